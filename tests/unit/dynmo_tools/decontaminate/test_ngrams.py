# ruff: noqa: RUF001, E501 - text of other scripts
from __future__ import annotations

import random
import re

import pytest

from dynmo_tools._common.errors import UsageError
from dynmo_tools.config.settings import parse_task
from dynmo_tools.decontaminate.ngrams import NgramFinder, NgramSizes, ScriptFinder, ngrams_of, split_words, word_starts
from dynmo_tools.decontaminate.steps import clean_pieces, find_all, split_around, texts_under

VOCABULARY = ["the", "a", "É", "b", "c", "d", "e"]


def slow_first(words, known, max_words):
    """The classic tool's loops."""
    lengths = sorted({len(ngram.split()) for ngram in known})
    free = len(words) - max_words + 1
    for i in range(free):
        for length in [max_words, *lengths]:
            if " ".join(words[i : i + length]) in known:
                return i, " ".join(words[i : i + length])
    if len(words) - max_words > 0:
        last = words[len(words) - max_words :]
        for length in lengths:
            if length == max_words:
                continue
            for i in range(len(last) - length + 1):
                if " ".join(last[i : i + length]) in known:
                    return len(words) - max_words + i, " ".join(last[i : i + length])
    return None


@pytest.mark.parametrize(
    "sizes",
    [NgramSizes(min_words=2, max_words=4), NgramSizes(min_words=3, max_words=5), NgramSizes(min_words=4, max_words=4)],
)
def test_finder_first_matches_megatron(sizes):
    rng = random.Random(4)
    found = 0
    for _ in range(400):
        tasks = [" ".join(rng.choices(VOCABULARY[:3], k=rng.randrange(1, 8))) for _ in range(rng.randrange(1, 6))]
        known = {ngram for text in tasks for ngram in ngrams_of(text, sizes)}
        finder = NgramFinder(known, sizes.max_words)
        words = split_words(" ".join(rng.choices([*VOCABULARY[:3] * 6, "unknown"], k=rng.randrange(30))))
        expected = slow_first(words, known, sizes.max_words)
        assert finder.first(words) == expected
        found += expected is not None
    assert found > 50


def test_ngrams_of_a_task_text_have_the_allowed_sizes():
    sizes = NgramSizes(min_words=2, max_words=3)
    assert list(ngrams_of("One", sizes)) == []
    assert list(ngrams_of("One, two!", sizes)) == ["one two"]
    assert list(ngrams_of("One, two-three four", sizes)) == ["one two three", "two three four"]


def test_word_starts_with_longer_lower_case_refer_to_the_text():
    text = "İstanbul and İzmir are cities"
    assert len(text.lower()) > len(text)
    starts = word_starts(text)
    assert word_starts("One  two") == [0, 5]
    tail = split_words(text).index("cities")
    assert text[starts[tail] :] == "cities"


def test_split_around_ends_at_sentence_boundaries():
    text = "First one. Second one. HERE IT IS now. Third one. Fourth one."
    start = text.index("HERE")
    assert split_around(text, start, 7, 1) == ("First one. Second one.", " Third one. Fourth one.")
    assert split_around(text, start, 7, 14) == ("First one.", " Fourth one.")
    assert split_around(text, start, 7, 1000) == ("", "")


def classic_pieces(text, known, max_words, margin, min_words):
    """The rule of the classic tool, written down again in its own order."""
    buffer, free = [text], []
    while buffer:
        text = buffer.pop(0)
        matches = list(re.finditer(r"\w+", text.lower()))
        hit = slow_first([m.group() for m in matches], known, max_words)
        if hit is None:
            free.append(text)
            continue
        left, right = split_around(text, matches[hit[0]].start(), len(hit[1]), margin)
        if len(left) > min_words:
            free.append(left)
        if len(right) > min_words:
            buffer.append(right)
    return free


def test_clean_pieces_matches_megatron():
    rng = random.Random(6)
    cut = 0
    for _ in range(300):
        tasks = [" ".join(rng.choices(VOCABULARY[:7], k=5)) for _ in range(2)]
        known = {ngram for text in tasks for ngram in ngrams_of(text, NgramSizes(min_words=2, max_words=3))}
        text = "".join(rng.choice(VOCABULARY[:7]) + rng.choice([" ", ". ", "  ", "! "]) for _ in range(80))
        finder = ScriptFinder(known, 3)
        pieces = clean_pieces(text, finder, 5, 4)
        assert pieces == classic_pieces(text, known, 3, 5, 4)
        cut += len(pieces) > 1
    assert cut > 50


def test_find_all_counts_each_ngram_once_per_document():
    finder = ScriptFinder({"a b c", "x y z"}, 3)
    assert find_all("a b c, a b c and x y z.", finder) == {"a b c", "x y z"}
    assert find_all("nothing here at all", finder) == set()


def test_texts_under_finds_keys_at_any_depth():
    squad = {"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "q1"}, {"question": "q2"}]}]}]}
    assert list(texts_under(squad, ("question",))) == ["q1", "q2"]
    assert list(texts_under({"question": {"text": "q"}}, ("question",))) == ["q"]
    assert list(texts_under({"questions": [{"input_text": "q"}, "r"]}, ("questions",))) == ["q", "r"]


def test_parse_task_reads_name_file_and_key(tmp_path):
    odd = tmp_path / "a:b.json"
    odd.touch()
    assert parse_task("squad=x/y.json")[2] == ("question",)
    assert parse_task("mine=x.json:prompt")[1:] == (odd.parent.__class__("x.json"), ("prompt",))
    assert parse_task(f"squad={odd}")[1] == odd
    for wrong in ("squad", "=x", "mine=x.json"):
        with pytest.raises(UsageError):
            parse_task(wrong)


# An item of a task, and sentences around it that are not part of it.
ITEMS = {
    "zh": ("世界上流量最大的河流是哪一条河？", "昨天下午老师带我们去了图书馆。", "那里有很多旧地图，大家看得很高兴。"),
    "ja": ("江戸時代に参勤交代を制度にした将軍は誰ですか。", "昨日の午後、先生と図書館へ行った。", "古い地図がたくさんあって楽しかった。"),
    "th": ("แม่น้ำสายใดเป็นแม่น้ำที่ยาวที่สุดในทวีปเอเชียและไหลผ่านกี่ประเทศ", "เมื่อวานครูพาเราไปห้องสมุด ", "ที่นั่นมีแผนที่เก่ามากมาย "),
    "hi": ("भारत की सबसे लंबी नदी कौन सी है और वह कहाँ से निकलती है", "कल शिक्षक हमें पुस्तकालय ले गए। ", "वहाँ बहुत से पुराने नक्शे थे। "),
    "ar": ("ما هو أطول نهر في قارة أفريقيا ومن أين ينبع هذا النهر", "ذهبنا أمس مع المعلم إلى المكتبة. ", "هل رأيت الخرائط القديمة هناك؟ "),
    "ko": ("아시아에서 가장 긴 강은 무엇이며 그 강은 어느 바다로 흘러 가는지", "어제 선생님과 도서관에 갔다. ", "거기에는 오래된 지도가 많았다. "),
    "en": ("which of the rivers of the continent is the longest one of all", "Yesterday we went there. ", "It was full of old maps. "),
}  # fmt: skip


def test_items_of_every_script_are_removed_with_a_part_of_the_document():
    for language, (item, first, second) in ITEMS.items():
        known = list(ngrams_of(item, NgramSizes()))
        assert known, language
        finder = ScriptFinder(known, 13)
        others = (first + second) * 20
        (left, right) = clean_pieces(others + item + " " + others, finder, 20, 50)
        for piece in (left, right):
            assert finder.first(split_words(piece)) is None, language
            assert len(piece) > len(others) - 80, language
        assert clean_pieces(others, finder, 20, 50) == [others]
    # Marks belong to their letters, and Latin words stay those of Megatron.
    assert split_words("हिन्दी में שָׁלוֹם naïve e\u0301t 日本go") == [
        "हिन्दी",
        "में",
        "שָׁלוֹם",
        "naïve",
        "e",
        "t",
        "日",
        "本",
        "go",
    ]
    assert list(ngrams_of("ประเทศไทยมีจังหวัดมากมาย", NgramSizes())) == []  # five words, whatever the number of letters
