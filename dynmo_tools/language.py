"""Which language a text is in, as langdetect judges it with a fixed seed."""

from __future__ import annotations

from typing import Any

from .errors import MissingExtraError


class LanguageJudge:
    """langdetect, its profiles in alphabetical order and seeded for each text: a verdict depends on nothing else."""

    def __init__(self, seed: int) -> None:
        try:
            from langdetect import detector_factory
            from langdetect.lang_detect_exception import LangDetectException
        except ImportError as error:
            raise MissingExtraError("langdetect", "prep") from error
        from pathlib import Path

        self._no_features: type[Exception] = LangDetectException
        self._factory: Any = detector_factory.DetectorFactory()
        profiles = sorted(Path(detector_factory.PROFILES_DIRECTORY).iterdir())
        self._factory.load_json_profile([path.read_text(encoding="utf-8") for path in profiles])
        self._factory.set_seed(seed)

    def detect(self, text: str) -> str | None:
        """The ISO 639-1 code of the most probable language; None for a text without letters to judge by."""
        detector = self._factory.create()
        detector.append(text)
        try:
            code: str = detector.detect()
        except self._no_features:
            return None
        return code
