from __future__ import annotations

import itertools
import random
import subprocess
import sys

import numpy as np
import pytest
from datasketch import MinHash

from dynmo_tools.errors import UsageError
from dynmo_tools.matching import Seen, ShingleCache, buckets, match, stars
from dynmo_tools.minhash import band_keys, candidate_probability, permutations, shingle_hashes, sign
from dynmo_tools.shingles import jaccard
from dynmo_tools.unionfind import UnionFind

WORDS = [f"{a}{b}" for a in ("ba", "ke", "li", "mo", "nu", "sa") for b in ("rt", "n", "ss", "x", "ck")]


def texts(count, seed=0):
    rng = random.Random(seed)
    made = [" ".join(rng.choices(WORDS, k=rng.randrange(1, 120))) for _ in range(count)]
    return [*made, "", "abc", "abc", "abcde", "日本語のテキスト", "naïve café " * 9]


def brute(first, second, length=5):
    a = {first[i : i + length] for i in range(len(first) - length + 1)}
    b = {second[i : i + length] for i in range(len(second) - length + 1)}
    if not a or not b:
        return float(first == second)
    return len(a & b) / len(a | b)


def test_signatures_equal_datasketch_bit_for_bit():
    perms = permutations(100, 1234)
    made = texts(60)
    ours = sign(made, 5, perms)
    for row, text in zip(ours, made, strict=True):
        theirs = MinHash(num_perm=100, seed=1234, scheme="affine32", hashfunc=int)
        if len(hashes := shingle_hashes(text, 5).tolist()):
            theirs.update_batch(hashes)
        assert row.tolist() == theirs.hashvalues.tolist()


@pytest.mark.parametrize("length", [3, 5, 9])
def test_jaccard_equals_sets_of_substrings(length):
    for a, b in itertools.combinations(texts(12), 2):
        assert jaccard(a, b, length) == pytest.approx(brute(a, b, length), abs=1e-12)


def test_the_cache_gives_the_same_whatever_its_size():
    made = texts(20)
    small = ShingleCache(made.__getitem__, 5, limit_bytes=100)
    for a, b in itertools.combinations(range(len(made)), 2):
        assert small.jaccard(a, b, "union") == jaccard(made[a], made[b], 5)


@pytest.mark.parametrize(("divisor", "expected"), [("union", 1 / 3), ("min", 0.5), ("max", 0.5)])
def test_the_divisor_is_chosen(divisor, expected):
    assert jaccard("abcdef", "bcdefg", 5, divisor) == pytest.approx(expected)


def test_estimates_follow_the_true_index():
    base = texts(1, seed=3)[0] + " " + " ".join(WORDS)
    other = base.replace("mort", "MORT").replace("kess", "KESS")
    signatures = sign([base, other], 5, permutations(1024, 7))
    estimate = float(np.mean(signatures[0] == signatures[1]))
    assert estimate == pytest.approx(brute(base, other), abs=0.06)


def planted(seed):
    rng = random.Random(seed)
    made = []
    for _ in range(60):
        base = rng.choices(WORDS, k=200)
        made.append(" ".join(base))
        for _ in range(rng.randrange(3)):
            copy = list(base)
            for _ in range(rng.randrange(1, 6)):
                copy[rng.randrange(len(copy))] = "changed"
            made.append(" ".join(copy))
    rng.shuffle(made)
    return made


def matched(made, threshold):
    signatures = sign(made, 5, permutations(100, 1234))
    sets = UnionFind(len(made))
    cache = ShingleCache(made.__getitem__, 5)
    pairs = list(
        match(
            lambda band: band_keys(signatures, band, 10),
            10,
            lambda a, b: cache.jaccard(a, b, "union"),
            sets.together,
            threshold=threshold,
        )
    )
    for pair in pairs:
        sets.join(pair.main, pair.other)
    return pairs, sets


def test_no_pair_below_the_threshold_and_hardly_one_missed_above():
    made = planted(5)
    pairs, sets = matched(made, 0.9)
    assert all(brute(made[p.main], made[p.other]) >= 0.9 for p in pairs)
    assert all(p.main < p.other for p in pairs)
    close = [(a, b) for a, b in itertools.combinations(range(len(made)), 2) if brute(made[a], made[b]) >= 0.95]
    found = sum(sets.find(a) == sets.find(b) for a, b in close)
    assert len(close) > 20
    assert found / len(close) >= 0.99


def test_short_texts_are_duplicates_only_of_equal_ones():
    made = ["abc", "abd", "", "abc", "", "x"]
    _, sets = matched(made, 0.9)
    assert list(sets.groups()) == [[0, 3], [2, 4]]


def test_groups_are_ordered_and_the_earliest_document_stands_first():
    sets = UnionFind(6)
    sets.join(5, 2)
    sets.join(4, 1)
    sets.join(2, 3)
    assert list(sets.groups()) == [[1, 4], [2, 3, 5]]
    assert sets.find(5) == 2


def test_buckets_are_the_repeated_keys():
    keys = np.asarray([7, 1, 7, 2, 1, 7], dtype=np.uint64)
    assert [bucket.tolist() for bucket in buckets(keys)] == [[1, 4], [0, 2, 5]]


def test_one_round_compares_with_the_first_document_only():
    near = {(0, 1), (2, 3)}

    def similarity(a, b):
        return float((a, b) in near)

    def pairs(rounds):
        return [(p.main, p.other) for p in stars([0, 1, 2, 3], similarity, 0.5, rounds, lambda a, b: False)]

    assert pairs(1) == [(0, 1)]
    assert pairs(2) == [(0, 1), (2, 3)]
    assert pairs(-1) == [(0, 1), (2, 3)]


def test_bands_must_divide_the_permutations():
    with pytest.raises(UsageError, match="100 permutations do not divide into 7 bands"):
        band_keys(np.zeros((1, 100), dtype=np.uint32), 0, 7)


def test_equal_bands_have_equal_keys_and_others_differ():
    rng = np.random.default_rng(1)
    signatures = rng.integers(0, 50, size=(500, 4), dtype=np.uint32)
    keys = band_keys(signatures, 1, 2)
    for a, b in itertools.combinations(range(200), 2):
        assert (keys[a] == keys[b]) == bool(np.array_equal(signatures[a, 2:], signatures[b, 2:]))


def test_the_classic_bands_find_98_6_percent_at_0_9():
    assert candidate_probability(0.9, 10, 10) == pytest.approx(0.986, abs=5e-4)


def test_large_buckets_find_what_pair_by_pair_finds_when_similarity_is_transitive():
    kinds = [n % 7 for n in range(200)]

    def same(a, b):
        return float(kinds[a] == kinds[b])

    sets = UnionFind(200)
    for pair in stars(range(200), same, 0.5, -1, sets.together):
        sets.join(pair.main, pair.other)
    assert [len(group) for group in sets.groups()] == [29] * 4 + [28] * 3


def test_a_pair_is_compared_once():
    seen = Seen(10)
    assert [seen(1, 2), seen(1, 2), seen(2, 1)] == [False, True, False]


def test_permutations_are_datasketch_s_without_loading_all_of_it():
    program = (
        "import sys; from dynmo_tools.minhash import permutations; made = permutations(8, 7);"
        "left = [name for name in sys.modules if name.startswith(('datasketch', 'scipy'))];"
        "from datasketch import MinHash, MinHashLSH;"
        "theirs = MinHash(num_perm=8, seed=7, scheme='affine32').permutations;"
        "sys.exit(left != [] or any((a != b).any() for a, b in zip(made, theirs)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
