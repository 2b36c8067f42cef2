from __future__ import annotations

import functools
import itertools
import random
import subprocess
import sys

import numpy as np
import pytest
from datasketch import MinHash

from dynmo_tools._common.errors import UsageError
from dynmo_tools.dedup.lsh import StoredBuckets, buckets, connect, groups_in_range, partition_groups
from dynmo_tools.dedup.minhash import band_keys, joined_hashes, permutations, sign
from dynmo_tools.dedup.shingles import jaccard
from dynmo_tools.dedup.union_find import SparseUnionFind, UnionFind
from dynmo_tools.dedup.verify import (
    ShingleCache,
    SimilarEstimate,
    SimilarityCache,
    match_bucket,
    match_group,
    match_to_survivors,
)

WORDS = [f"{a}{b}" for a in ("ba", "ke", "li", "mo", "nu", "sa") for b in ("rt", "n", "ss", "x", "ck")]


def texts(count, seed=0):
    rng = random.Random(seed)
    made = [" ".join(rng.choices(WORDS, k=rng.randrange(1, 120))) for _ in range(count)]
    return [*made, "", "abc", "abc", "abcde", "日本語のテキスト", "naïve café " * 9]


@functools.lru_cache(1000)
def shingles(text, length):
    return {text[at : at + length] for at in range(len(text) - length + 1)}


def brute(first, second, length=5):
    a, b = shingles(first, length), shingles(second, length)
    if not a or not b:
        return float(first == second)
    return len(a & b) / len(a | b)


@pytest.mark.parametrize("long_characters", [7, 64, 1 << 20])
def test_signatures_equal_datasketch_bit_for_bit(monkeypatch, long_characters):
    monkeypatch.setattr("dynmo_tools.dedup.minhash.LONG_CHARACTERS", long_characters)
    perms = permutations(100, 1234)
    made = texts(60 if long_characters > 64 else 12)
    ours = sign(made, 5, perms)
    for row, text in zip(ours, made, strict=True):
        theirs = MinHash(num_perm=100, seed=1234, scheme="affine32", hashfunc=int)
        if len(hashes := joined_hashes([text], 5)[0].tolist()):
            theirs.update_batch(hashes)
        assert row.tolist() == theirs.hashvalues.tolist()


@pytest.mark.parametrize(("length", "part"), [(3, 7), (5, 1), (5, 1 << 20), (9, 7)])
def test_jaccard_equals_that_of_substring_sets(monkeypatch, length, part):
    monkeypatch.setattr("dynmo_tools.dedup.shingles.PART_CHARACTERS", part)
    for a, b in itertools.combinations(texts(12), 2):
        assert jaccard(a, b, length) == pytest.approx(brute(a, b, length), abs=1e-12)


def test_shingle_cache_of_any_size_returns_the_same():
    made = texts(20)
    small = ShingleCache(made.__getitem__, 5, limit_bytes=100)
    for a, b in itertools.combinations(range(len(made)), 2):
        assert small.jaccard(a, b, "union") == jaccard(made[a], made[b], 5)


@pytest.mark.parametrize(("divisor", "expected"), [("union", 1 / 3), ("min", 0.5), ("max", 0.5)])
def test_jaccard_with_each_divisor_is_exact(divisor, expected):
    assert jaccard("abcdef", "bcdefg", 5, divisor) == pytest.approx(expected)


def test_signature_agreement_estimates_the_jaccard_index():
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


def stored_buckets(folder, signatures, bands, max_keys=1 << 20):
    """The buckets of each band in files of ``folder``."""
    stored = []
    for band in range(bands):
        made = StoredBuckets(members=folder / f"{band}-members", sizes=folder / f"{band}-sizes")
        keys = band_keys(signatures, band, bands)
        parts = list(buckets([keys[:7], keys[7:]], len(keys), folder, max_keys))
        made.members.write_bytes(b"".join(members.tobytes() for members, _ in parts))
        made.sizes.write_bytes(b"".join(sizes.tobytes() for _, sizes in parts))
        stored.append(made)
    return stored


def matched(folder, made, threshold, parts=1, *, all_pairs=False):
    stored = stored_buckets(folder, sign(made, 5, permutations(100, 1234)), 10)
    sets = UnionFind(len(made))
    cache = ShingleCache(made.__getitem__, 5)
    roots = connect(stored, len(made)).parents
    pairs = [
        pair
        for first, last in itertools.pairwise(partition_groups(stored, roots, parts))
        for group in groups_in_range(stored, roots, first, last)
        for pair in match_group(
            group, lambda a, b: cache.jaccard(a, b, "union"), threshold=threshold, all_pairs=all_pairs
        )
    ]
    for pair in pairs:
        sets.join(pair.main, pair.other)
    return pairs, sets


def test_dedup_finds_pairs_above_the_threshold_only(tmp_path):
    made = planted(5)
    pairs, sets = matched(tmp_path, made, 0.9)
    assert all(brute(made[p.main], made[p.other]) >= 0.9 for p in pairs)
    assert all(p.main < p.other for p in pairs)
    close = [(a, b) for a, b in itertools.combinations(range(len(made)), 2) if brute(made[a], made[b]) >= 0.95]
    found = sum(sets.find(a) == sets.find(b) for a, b in close)
    assert len(close) > 20
    assert found / len(close) >= 0.99


def test_texts_below_a_shingle_match_equal_ones_only(tmp_path, groups_of):
    made = ["abc", "abd", "", "abc", "", "x"]
    _, sets = matched(tmp_path, made, 0.9)
    assert groups_of(sets) == [[0, 3], [2, 4]]


def in_lists(found):
    """Buckets as lists, from arrays of members and sizes."""
    made = []
    for members, sizes in found:
        ends = np.cumsum(sizes).tolist()
        made += [members[begin:end].tolist() for begin, end in itertools.pairwise([0, *ends])]
    return made


@pytest.mark.parametrize("max_keys", [3, 100, 1 << 20])
def test_buckets_have_the_documents_of_each_shared_key(tmp_path, max_keys):
    keys = np.random.default_rng(0).integers(0, 500, 1000, dtype=np.uint64) << np.uint64(55)
    expected = [found.tolist() for key in np.unique(keys) if len(found := np.flatnonzero(keys == key)) > 1]
    assert in_lists(buckets([keys[:300], keys[300:301], keys[301:]], len(keys), tmp_path, max_keys)) == expected
    assert in_lists(buckets([np.arange(9, dtype=np.uint64)], 9, tmp_path, max_keys)) == []
    assert in_lists(buckets([], 0, tmp_path, max_keys)) == []
    assert list(tmp_path.iterdir()) == []


def test_connect_matches_the_components_of_the_buckets(tmp_path, monkeypatch):
    monkeypatch.setattr("dynmo_tools.dedup.lsh.BLOCK_BUCKETS", 3)
    signatures = np.random.default_rng(4).integers(0, 250, size=(80, 4), dtype=np.uint32)
    stored = stored_buckets(tmp_path, signatures, 4)
    every = [tuple(bucket) for band in stored for bucket in in_lists(band.blocks())]
    slow = UnionFind(80)
    for bucket in every:
        for other in bucket[1:]:
            slow.join(bucket[0], other)
    sets = connect(stored, 80)
    assert sets.parents.tolist() == [slow.find(at) for at in range(80)]
    whole = list(groups_in_range(stored, sets.parents, 0, 80))
    assert len(whole) > 5
    assert sorted(bucket for group in whole for bucket in map(tuple, group)) == sorted(set(every))
    for parts in (1, 2, 7, 200):
        cuts = partition_groups(stored, sets.parents, parts)
        assert len(cuts) == parts + 1
        assert (cuts[0], cuts[-1]) == (0, 80)
        assert [g for a, b in itertools.pairwise(cuts) for g in groups_in_range(stored, sets.parents, a, b)] == whole


def test_partition_of_groups_does_not_change_the_pairs(tmp_path, groups_of):
    made = planted(9)
    for all_pairs in (False, True):
        (whole, sets), (cut, _) = (matched(tmp_path, made, 0.5, parts, all_pairs=all_pairs) for parts in (1, 13))
        assert whole == cut
        assert len({(pair.main, pair.other) for pair in whole}) > 20
    assert groups_of(sets) == groups_of(matched(tmp_path, made, 0.5)[1])


def test_match_group_with_all_pairs_matches_brute_force(tmp_path):
    made = planted(2)
    found = {(p.main, p.other) for p in matched(tmp_path, made, 0.92, all_pairs=True)[0]}
    true = {(a, b) for a, b in itertools.combinations(range(len(made)), 2) if brute(made[a], made[b]) >= 0.92}
    assert found <= true
    assert len(found) >= 0.98 * len(true) > 10


@pytest.mark.parametrize(("kinds", "divisor"), [(4, "union"), (80, "union"), (80, "max"), (80, "min")])
def test_every_removed_document_is_similar_to_a_survivor(monkeypatch, kinds, divisor):
    """As a plain search in document order, whether few or many documents are survivors in one bucket."""
    monkeypatch.setattr("dynmo_tools.dedup.verify.ALL_PAIRS", 8)
    rng = random.Random(kinds)
    bases = [" ".join(rng.choices(WORDS, k=60)) for _ in range(kinds)]
    made = [rng.choice(bases) + rng.choice(["", " end", " other end", " a much longer end"]) for _ in range(160)]
    buckets_ = [sorted(rng.sample(range(160), 100)), list(range(160)), sorted(rng.sample(range(160), 30))]
    signatures = sign(made, 5, permutations(100, 1234))
    compared = []

    def similarity(first, second):
        compared.append((first, second))
        return jaccard(made[first], made[second], 5, divisor)

    estimate = SimilarEstimate(signatures.__getitem__, 0.93, divisor)
    found = {p.other: p.main for p in match_to_survivors(buckets_, similarity, estimate, threshold=0.93, rounds=-1)}
    num_compared = len(compared)
    survivors, expected = [], {}
    for at in range(160):
        similar = [other for other in survivors if jaccard(made[other], made[at], 5, divisor) >= 0.93]
        if similar:
            expected[at] = similar[0]
        else:
            survivors.append(at)
    assert found == expected
    assert 40 < len(expected) < 155
    # Signatures exclude nearly all others where they bound the index.
    assert kinds == 4 or (num_compared < 1000) == (divisor != "min")


def test_union_pairs_matches_single_joins():
    rng = random.Random(6)
    pairs = [(rng.randrange(500), rng.randrange(500)) for _ in range(300)] + [(n + 1, n) for n in range(100, 300)]
    at_once, one_by_one, named = UnionFind(500), UnionFind(500), SparseUnionFind()
    for begin in range(0, len(pairs), 99):
        at_once.union_pairs(*np.asarray(pairs[begin : begin + 99]).T)
    for first, second in pairs:
        one_by_one.join(first, second)
        named.join(first, second)
    at_once.flatten()
    expected = [one_by_one.find(at) for at in range(500)]
    assert at_once.parents.tolist() == expected
    assert [named.find(at) for at in range(500)] == expected


def test_match_bucket_with_one_round_uses_the_first_document():
    near = {(0, 1), (2, 3)}

    def similarity(a, b):
        return float((a, b) in near)

    def pairs(rounds):
        return [(p.main, p.other) for p in match_bucket([0, 1, 2, 3], similarity, 0.5, rounds, lambda a, b: False)]

    assert pairs(1) == [(0, 1)]
    assert pairs(2) == [(0, 1), (2, 3)]
    assert pairs(-1) == [(0, 1), (2, 3)]


def test_band_keys_refuses_bands_of_unequal_sizes():
    with pytest.raises(UsageError, match="100 permutations cannot be divided into 7 bands"):
        band_keys(np.zeros((1, 100), dtype=np.uint32), 0, 7)


def test_band_keys_are_equal_for_equal_bands_only():
    rng = np.random.default_rng(1)
    signatures = rng.integers(0, 50, size=(500, 4), dtype=np.uint32)
    keys = band_keys(signatures, 1, 2)
    for a, b in itertools.combinations(range(200), 2):
        assert (keys[a] == keys[b]) == bool(np.array_equal(signatures[a, 2:], signatures[b, 2:]))


def test_large_bucket_with_transitive_similarity_finds_all_groups(groups_of):
    kinds = [n % 7 for n in range(200)]

    def same(a, b):
        return float(kinds[a] == kinds[b])

    sets = UnionFind(200)
    for pair in match_bucket(range(200), same, 0.5, -1, sets.is_connected):
        sets.join(pair.main, pair.other)
    assert [len(group) for group in groups_of(sets)] == [29] * 4 + [28] * 3


def test_similarity_cache_compares_once_and_is_bounded(monkeypatch):
    monkeypatch.setattr("dynmo_tools.dedup.verify.COMPARED_PAIRS", 10)
    calls = []
    compared = SimilarityCache(lambda a, b: calls.append((a, b)) or a / b)
    assert [compared(1, 2), compared(1, 2), compared(2, 1)] == [0.5, 0.5, 2.0]
    assert calls == [(1, 2), (2, 1)]
    for other in range(1, 30):
        compared(3, other)
        assert len(compared.known) <= 10
    assert compared(1, 2) == 0.5


def test_datasketch_is_imported_by_the_first_permutations_only():
    program = (
        "import sys, dynmo_tools.dedup.steps; from dynmo_tools.dedup.minhash import permutations;"
        "before = 'datasketch' in sys.modules; ours = permutations(8, 7);"
        "from datasketch import MinHash;"
        "theirs = MinHash(num_perm=8, seed=7, scheme='affine32').permutations;"
        "sys.exit(before or any((a != b).any() for a, b in zip(ours, theirs)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("size", [3, 200], ids=["all pairs", "stars"])
def test_match_bucket_pair_exactly_at_threshold_is_a_duplicate(size):
    def similarity(first, second):
        return 0.5 if (first, second) == (0, 1) else 0.0

    found = list(match_bucket(range(size), similarity, 0.5, -1, lambda first, second: False))
    assert [(pair.main, pair.other, pair.jaccard) for pair in found] == [(0, 1, 0.5)]
