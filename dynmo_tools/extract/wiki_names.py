"""Names of namespaces and languages, by which a link of a wiki is a file, a category, another language, or text.

A dump states the names of its namespaces, but not their aliases, which most pages of some wikis use: the dump of the
Chinese Wikipedia has ``Category``, its pages ``分类``. The aliases of MediaWiki's translations are listed here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

MEDIA, FILE, TEMPLATE, CATEGORY = -2, 6, 10, 14
# English names are valid in every wiki.
ENGLISH = {MEDIA: ("media",), FILE: ("file", "image"), TEMPLATE: ("template",), CATEGORY: ("category",)}
# One entry per language: names of files, then names of categories; "_" stands for a space.
_TRANSLATED = """
ar ملف صورة / تصنيف
az şəkil fayl / kateqoriya
be файл выява / катэгорыя
bg файл картинка / категория
bn চিত্র / বিষয়শ্রেণী
bs datoteka slika / kategorija
ca fitxer imatge / categoria
cs soubor / kategorie
da fil billede / kategori
de datei bild / kategorie
el αρχείο εικόνα / κατηγορία
eo dosiero / kategorio
es archivo imagen / categoría
et fail pilt / kategooria
eu fitxategi irudi / kategoria
fa پرونده تصویر / رده
fi tiedosto kuva / luokka
fr fichier / catégorie
gl ficheiro imaxe / categoría
he קובץ תמונה / קטגוריה
hi चित्र / श्रेणी
hr datoteka slika / kategorija
hu fájl kép / kategória
hy պատկեր / կատեգորիա
id berkas gambar / kategori
it immagine / categoria
ja ファイル 画像 / カテゴリ
ka ფაილი სურათი / კატეგორია
kk сурет файл / санат
ko 파일 그림 / 분류
lt vaizdas / kategorija
lv attēls / kategorija
mk податотека слика / категорија
ml പ്രമാണം ചിത്രം / വർഗ്ഗം
mr चित्र / वर्ग
ms fail imej / kategori
nl bestand afbeelding / categorie
nn fil bilde / kategori
no fil bilde / kategori
pl plik grafika / kategoria
pt ficheiro arquivo imagem / categoria
ro fișier fişier imagine / categorie
ru файл изображение / категория
sh datoteka slika датотека слика / kategorija категорија
sk súbor obrázok / kategória
sl slika datoteka / kategorija
sq skeda figura / kategoria
sr датотека слика slika datoteka / категорија kategorija
sv fil bild / kategori
ta படிமம் / பகுப்பு
te దస్త్రం బొమ్మ / వర్గం
th ไฟล์ ภาพ / หมวดหมู่
tr dosya resim / kategori
uk файл зображення / категорія
ur ملف تصویر / زمرہ
uz fayl tasvir / turkum
vi tập_tin hình / thể_loại
zh 文件 档案 檔案 图像 圖像 图片 圖片 / 分类 分類
"""
# Codes of Wikipedias: a link with one of them as prefix leads to the same page in another language.
_CODES = """
aa ab ace ady af ak als alt am ami an ang ann anp ar arc ary arz as ast atj av avk awa ay az azb ba ban bar
bat-smg bbc bcl bdr be be-tarask be-x-old bew bg bh bi bjn blk bm bn bo bpy br bs btm bug bxr ca cbk-zam cdo ce ceb
ch cho chr chy ckb co cr crh cs csb cu cv cy da dag de dga din diq dsb dtp dty dv dz ee el eml en eo es et eu ext fa
fat ff fi fiu-vro fj fo fon fr frp frr fur fy ga gag gan gcr gd gl glk gn gom gor got gpe gsw gu guc gur guw gv ha
hak haw he hi hif ho hr hsb ht hu hy hyw hz ia iba id ie ig igl ii ik ilo inh io is it iu ja jam jbo jv ka kaa kab
kbd kbp kcg kg kge ki kj kk kl km kn ko koi kr krc ks ksh ku kus kv kw ky la lad lb lbe lez lfn lg li lij lld lmo ln
lo lrc lt ltg lv lzh mad mai map-bms mdf mg mh mhr mi min mk ml mn mni mnw mos mr mrj ms mt mus mwl my myv mzn na
nah nan nap nb nds nds-nl ne new ng nia nl nn no nov nqo nr nrm nso nv ny oc olo om or os pa pag pam pap pcd pcm pdc
pfl pi pih pl pms pnb pnt ps pt pwn qu rki rm rmy rn ro roa-rup roa-tara rsk ru rue rup rw sa sah sat sc scn sco sd
se sg sgs sh shi shn shy si simple sk skr sl sm smn sn so sq sr srn ss st stq su sv sw syl szl szy ta tay tcy tdd te
tet tg th ti tig tk tl tly tn to tpi tr trv ts tt tum tw ty tyv udm ug uk ur uz ve vec vep vi vls vo vro wa war wo
wuu xal xh xmf yi yo yue za zea zgh zh zh-classical zh-min-nan zh-yue zu
"""
LANGUAGES = frozenset(_CODES.split())
# Languages with several scripts or vocabularies, whose pages have rules between -{ and }-.
VARIANT_LANGUAGES = frozenset(
    {"ban", "crh", "gan", "iu", "kk", "ku", "sh", "shi", "sr", "tg", "uz", "wuu", "zgh", "zh"}
)
MEDIA_ENDINGS = (
    ".jpg", ".jpeg", ".png", ".gif", ".svg", ".tif", ".tiff", ".webp", ".xcf", ".djvu", ".pdf", ".ogg", ".oga", ".ogv",
    ".ogx", ".opus", ".flac", ".wav", ".mp3", ".mid", ".mpg", ".webm", ".stl",
)  # fmt: skip
# Without a possessive quantifier, which Python before 3.11.5 matches wrong in a group.
_RULE = re.compile(r"-\{(?!\{)((?:[^-}]|-(?!\{)|\}(?!-))*)\}-")
_FLAGS = re.compile(r"\s*([A-Z-](?:\s*;\s*[A-Z-])*|[a-z]{2,3}(?:-[a-z]+)*(?:\s*;\s*[a-z]{2,3}(?:-[a-z]+)*)*|)\s*\|")
_VARIANT = re.compile(r"\s*(?:[^;:=>]*=>\s*)?([a-z]{2,3}(?:-[a-z]+)*)\s*:")
_VARIANT_END = re.compile(r";(?=\s*(?:(?:[^;:=>]*=>\s*)?[a-z]{2,3}(?:-[a-z]+)*\s*:|$))")
# Flags of rules that show nothing: other places of the page use them.
HIDDEN_FLAGS = frozenset("HT-D")
MAX_RULE_NESTING = 8


class LinkKind(Enum):
    """What a link shows."""

    TEXT = "text"
    FILE = "file"
    CATEGORY = "category"
    LANGUAGE = "language"


def _translated() -> dict[str, dict[int, tuple[str, ...]]]:
    names = {}
    for line in _TRANSLATED.strip().splitlines():
        language, _, rest = line.partition(" ")
        files, _, categories = rest.partition(" / ")
        names[language] = {
            kind: tuple(name.replace("_", " ") for name in text.split())
            for kind, text in ((FILE, files), (CATEGORY, categories))
        }
    return names


TRANSLATED = _translated()


def _normal(name: str) -> str:
    # Direction marks are in links of Arabic and Hebrew pages; MediaWiki ignores them.
    return " ".join(re.sub("[\u200e\u200f\u202a-\u202e]", "", name).replace("_", " ").split()).casefold()


@dataclass(frozen=True, kw_only=True)
class WikiNames:
    """The names of one wiki.

    Attributes:
        language: code of its language; empty if unknown.
        files: names of the namespace of files, case-folded.
        categories: names of the namespace of categories.
        templates: names of the namespace of templates.
    """

    language: str = ""
    files: frozenset[str] = field(default_factory=lambda: _names({}, "", FILE))
    categories: frozenset[str] = field(default_factory=lambda: _names({}, "", CATEGORY))
    templates: frozenset[str] = field(default_factory=lambda: _names({}, "", TEMPLATE))

    @classmethod
    def of(cls, language: str, stated: Mapping[int, Sequence[str]]) -> WikiNames:
        """The names of a wiki.

        Args:
            language: code of its language; empty if unknown.
            stated: names that the dump states, by number of the namespace.
        """
        files, categories, templates = (_names(stated, language, kind) for kind in (FILE, CATEGORY, TEMPLATE))
        return cls(language=language, files=files, categories=categories, templates=templates)

    def link_kind(self, title: str) -> LinkKind:
        """What a link with this target shows; a target with a leading colon is text."""
        prefix, colon, rest = title.partition(":")
        name = _normal(prefix)
        # A colon within a title does not end a prefix: [[Re:Zero]], [[Halo: Reach]].
        if not colon or not name or not rest.strip():
            return LinkKind.TEXT
        if name in self.categories:
            return LinkKind.CATEGORY
        if name in self.files or (name not in ENGLISH[MEDIA] and rest.strip().lower().endswith(MEDIA_ENDINGS)):
            return LinkKind.FILE
        return LinkKind.LANGUAGE if name in LANGUAGES and name != self.language else LinkKind.TEXT

    def template_name(self, name: str) -> str:
        """The normal form of the name of a template, without its namespace."""
        prefix, colon, rest = name.partition(":")
        return _normal(rest if colon and _normal(prefix) in self.templates else name)


def _names(stated: Mapping[int, Sequence[str]], language: str, kind: int) -> frozenset[str]:
    # Without a language, those of all languages count.
    translated = [TRANSLATED[language]] if language in TRANSLATED else [] if language else list(TRANSLATED.values())
    aliases = [name for names in translated for name in names.get(kind, ())]
    return frozenset(map(_normal, (*ENGLISH[kind], *stated.get(kind, ()), *aliases)))


def convert_variants(markup: str, language: str) -> str:
    """Replace rules between ``-{`` and ``}-`` by the text of their first variant.

    Args:
        markup: markup of a page.
        language: language of the wiki; others than ``VARIANT_LANGUAGES`` have no such rules.
    """
    if "-{" not in markup or (language and language not in VARIANT_LANGUAGES):
        return markup
    for _ in range(MAX_RULE_NESTING):
        shorter = _RULE.sub(_shown, markup)
        if shorter == markup:
            break
        markup = shorter
    return markup


def _shown(found: re.Match[str]) -> str:
    content = found[1]
    flags = _FLAGS.match(content)
    if flags is not None:
        names = {flag.strip() for flag in flags[1].split(";")}
        if names & HIDDEN_FLAGS:
            return ""
        content = content[flags.end() :]
        if "R" in names:
            return content
    if _VARIANT.match(content) is None:
        return content
    # A semicolon also occurs within a text, as in an entity: only one before a variant or the end divides.
    first = _VARIANT_END.split(content)[0]
    return first[_VARIANT.match(first).end() :].strip()  # type: ignore[union-attr]
