"""The step ``extract-wiki``: one document per article of a MediaWiki dump, as in WikiExtractor's ``--json``."""

from __future__ import annotations

from xml.etree import ElementTree

from .._common.errors import DynmoError
from ..config.settings import ExtractWikiSettings
from ..io.jsonl import encode_row
from ..io.mediawiki_dump import Page, read_pages, read_site
from ..runner.parts import map_phases, records_kind
from ..runner.task import Phase, Task
from ..runner.task_manifest import TaskManifest
from .wiki_names import WikiNames
from .wikitext import text_of


def extract_phases(manifest: TaskManifest) -> list[Phase]:
    """The phases of ``extract-wiki``."""
    return map_phases(manifest, "extract.wikipedia:extract")


def extract(task: Task) -> None:
    """Task function: the articles that begin in one slice of a dump.

    Raises:
        DynmoError: the dump is truncated, damaged or not XML.
    """
    settings: ExtractWikiSettings = task.job.settings
    writer = task.create(task.part(records_kind(task)))
    path = task.slice.path
    try:
        site = read_site(path)
        base, names = settings.url_base or site.base, WikiNames.of(site.language, site.namespaces)
        for found in read_pages(task.slice):
            # Pages are not lines of JSON: they are counted here, by the bytes of their markup.
            task.count(found.markup)
            reason = _skip(found, settings)
            text = "" if reason else text_of(found.markup, keep_lists=settings.lists, names=names)
            if reason or not text:
                task.counts.drop(reason or "empty")
                continue
            # Keys, and their order, of WikiExtractor's --json.
            row = {
                "id": found.number,
                "revid": found.revision,
                "url": f"{base}?curid={found.number}",
                "title": found.title,
                "text": text,
            }
            task.write_row(writer, encode_row(row))
    except (ElementTree.ParseError, EOFError) as error:
        raise DynmoError(f"{path}: truncated, or not MediaWiki XML: {error}; download the dump again") from error
    except OSError as error:
        if error.errno is not None:  # an error of the disk, not of the decompressor
            raise
        raise DynmoError(f"{path}: damaged: {error}; download the dump again") from error


def _skip(page: Page, settings: ExtractWikiSettings) -> str | None:
    # A redirect has one link and no text; WikiExtractor writes it as an empty document.
    if page.redirect:
        return "redirect"
    return None if page.namespace in settings.namespaces else "namespace"
