# ruff: noqa: RUF001 - signs of other scripts
from __future__ import annotations

import json
import random

import ftfy
import pytest
import tokenizers

from dynmo_tools.filters.clean import (
    NORMALIZATION_OFF,
    CleanSettings,
    clean_text,
    is_short,
    plain_punctuation,
    repair,
    token_counter,
)
from dynmo_tools.filters.language import LanguageDetector
from dynmo_tools.tokenization.definitions import built_in_gpt2
from tests.tables import table

ENGLISH = "The quick brown fox jumps over the lazy dog, and then it sleeps in the shade of an old tree. " * 12
GERMAN = "Der schnelle braune Fuchs springt über den faulen Hund und schläft dann im Schatten des Baumes. " * 12


@table(
    "text",
    [
        "plain",
        "a &amp; b",
        "schÃ¶n",
        "“quotes”",
        "tab\tline\n",
        "a\r\nb",
        "\x1b[31mred",
        "ﬁne",
        "caf\u0065\u0301",
        "\ud800",
    ],
)
def test_repair_matches_ftfy(text):
    for normalize in (False, True):
        assert repair(text, normalize=normalize) == fix_text(text, normalize)


def fix_text(text, normalize):
    return ftfy.fix_text(text, ftfy.TextFixerConfig(**({} if normalize else NORMALIZATION_OFF)))


def test_repair_of_several_lines_matches_ftfy(varied_texts):
    rng = random.Random(5)
    pieces = [
        "plain",
        "a &amp; b",
        "schÃ¶n",
        "<b>",
        "“quotes”",
        "",
        "x\r",
        "\x1b[31mred",
        "tab\t",
        "\ud83d\ude00",
        "&lt;",
    ]
    texts = ["\n".join(rng.choices(pieces, k=rng.randrange(1, 7))) for _ in range(400)]
    texts += [*varied_texts, *(f"word {chr(code)} word" for code in range(128))]
    for text in texts:
        normalize = rng.random() < 0.5
        assert repair(text, normalize=normalize) == fix_text(text, normalize)


def test_text_without_errors_is_unchanged_unless_normalized():
    texts = {
        "你好，世界！（真的吗？）《书》：１２３": "你好,世界!(真的吗?)《书》:123",
        "彼は「ﾃｽﾄ」と言った。ＡＢＣ": "彼は「テスト」と言った。ABC",
        "“It’s ‘fine’ — ﬁne”…": "\"It's 'fine' — fine\"…",
        "cafe\u0301 \u212b \uf900 \u0958": "café Å 豈 क़",
        "한글": "한글",
        "a\r\nb\u2028c": "a\nb\nc",
    }
    for text, normalized in texts.items():
        assert (repair(text), repair(text, normalize=True)) == (text, normalized)
    # Errors are repaired in every script, next to such signs.
    assert repair("“schÃ¶n”，\ud83d\ude00 &amp; \x1b[31mred") == "“schön”，😀 & red"


GPT2 = token_counter(None)


def test_built_in_tokenizer_matches_gpt2(varied_texts, shared_data):
    definition = built_in_gpt2()
    assert definition.ids == json.loads((shared_data / "tok" / "gpt2-vocab.json").read_text())
    oracle = tokenizers.Tokenizer.from_file(str(shared_data / "tok" / "gpt2_tokenizer.json"))
    texts = [
        *(text for text in varied_texts if "<|" not in text),
        "I'm 42 years_old,  ok\n",
        "schön ½ Ⅷ naïve 日本語 \u0301x",
        " \u3000 ",
        "",
    ]
    assert [GPT2(text) for text in texts] == [len(oracle.encode(text).ids) for text in texts]


@pytest.mark.parametrize(("word", "tokens"), [("hello", 1), ("antidisestablishmentarianism", 5), ("\u00bd", 1)])
def test_token_counter_counts_tokens_not_words(word, tokens):
    assert GPT2(word) == tokens


def test_clean_text_keeps_few_long_words_as_megatron():
    text = " ".join(["antidisestablishmentarianism"] * 26)  # 26 words, 130 tokens
    assert clean_text(text, CleanSettings(language=""), GPT2, None).drop_reason is None


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("a " * 127, False),  # 127 tokens of text and the end of the document make 128
        ("a " * 126, True),
        ("x" * 1024, False),  # long texts pass uncounted
        ("x" * 1023, False),  # 129 tokens
        ("x" * 900, True),
        ("x" * 126, True),
    ],
)
def test_is_short_counts_tokens_near_the_limit(text, short):
    assert is_short(text.strip(), 128, GPT2) is short


def test_clean_text_reports_each_drop_reason():
    settings = CleanSettings()
    detector = LanguageDetector(0)

    def drop(text):
        return clean_text(text, settings, GPT2, detector).drop_reason

    assert drop(ENGLISH) is None
    assert drop(GERMAN) == "language"
    assert drop("Too short.") == "short"
    assert drop(" \n ") == "empty"
    assert drop("12345 67890 " * 100) == "no-features"


def test_clean_text_returns_the_repaired_text():
    assert clean_text("schÃ¶n &amp; gut", CleanSettings(min_tokens=1), GPT2, None).text == "schön & gut"


def test_detect_does_not_depend_on_earlier_texts():
    mixed = "Bonjour hello guten Tag " * 50
    fresh = LanguageDetector(0).detect(mixed)
    used = LanguageDetector(0)
    assert {used.detect(text) for text in (ENGLISH, GERMAN, mixed, mixed)} == {"en", "de", fresh}
    assert used.detect(mixed) == fresh


def test_plain_punctuation_replaces_typographic_signs():
    typographic = "\u201cIt\u2019s\u201d \u2026 a\u2013b\u2014c\uff01\uff08ok\uff09\uff1aé"
    assert plain_punctuation(typographic) == '"It\'s" ... a-b - c!(ok):é'


def slow_detector():
    """langdetect's own detector, with its profiles in the order that ours has."""
    from pathlib import Path

    from langdetect import detector_factory
    from langdetect.lang_detect_exception import LangDetectException

    factory = detector_factory.DetectorFactory()
    profiles = sorted(Path(detector_factory.PROFILES_DIRECTORY).iterdir())
    factory.load_json_profile([path.read_text(encoding="utf-8") for path in profiles])
    factory.set_seed(0)

    def detect(text):
        detector = factory.create()
        detector.append(text)
        try:
            return detector.detect()
        except LangDetectException:
            return None

    return detect


def test_detect_matches_langdetect_on_unusual_texts(varied_texts):
    slow, fast = slow_detector(), LanguageDetector(0)
    odd = [
        *varied_texts,
        ENGLISH,
        GERMAN,
        ENGLISH[:300] + GERMAN[:300],
        "HELLO World OF CAPS " * 30,
        "see http://a.b/c or me@x.yz",
        "Привет мир, как дела? Latin words",
        "こんにちは世界 hello",
        "中文 漢字 テスト",
        "Tiếng Việt có dấu a\u0300 e\u0301 " * 9,
        "ﬀ ș ț ی",
    ]
    assert [fast.detect(text) for text in odd] == [slow(text) for text in odd]


@pytest.mark.complete
@pytest.mark.data
def test_detect_matches_langdetect_in_a_hundred_languages(shared_data):
    import zipfile

    slow, fast = slow_detector(), LanguageDetector(0)
    with zipfile.ZipFile(shared_data / "lid" / "udhr2.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".txt"))
        texts = [archive.read(name).decode("utf-8", "replace")[500:1500] for name in names[::3]]
    assert len(texts) > 100
    assert [fast.detect(text) for text in texts] == [slow(text) for text in texts]


@pytest.mark.parametrize("ending", [SystemExit(143), KeyboardInterrupt()])
def test_signal_while_the_profiles_are_loaded_ends_the_process(monkeypatch, ending):
    from langdetect.detector_factory import DetectorFactory

    def add_profile(*_):
        raise ending

    monkeypatch.setattr(DetectorFactory, "add_profile", add_profile)
    with pytest.raises(type(ending)) as raised:
        LanguageDetector(0)
    assert raised.value is ending


def test_damaged_profile_of_langdetect_is_its_error(monkeypatch):
    from langdetect.detector_factory import DetectorFactory
    from langdetect.lang_detect_exception import LangDetectException

    monkeypatch.setattr(DetectorFactory, "add_profile", lambda *_: 1 / 0)
    with pytest.raises(LangDetectException, match="Profile format error"):
        LanguageDetector(0)
