"""How engines cut tensors: the vectors that their own code gave, and that every rank's part adds up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import dense, llama, plan_of, setting_of, tiny
from trainledger.account.shares import shares
from trainledger.account.traffic import all_traffic
from trainledger.arrays import IntArray
from trainledger.inventory.inventory import Inventory
from trainledger.plans import partition

SIZES = [1000, 65, 7, 100000]


@pytest.mark.parametrize(
    ("sizes", "options", "ranges", "unpadded"),
    [
        (SIZES, {"over": 8}, [(0, 101248)], [101224]),
        (SIZES, {"over": 8, "bucket_size": 2000}, [(0, 100096), (100096, 101376)], [100000, 1192]),
        (SIZES, {"over": 24, "bucket_size": 2000}, [(0, 100224), (100224, 101760)], [100000, 1192]),
        (SIZES, {"over": 96, "high_busbw": True}, [(0, 196608)], [101224]),
        ([1000, 65, 7], {"over": 8, "shared": [0]}, [(0, 256), (256, 1280)], [192, 1000]),
    ],
)
def test_megatron_lays_its_buffer_out_as_its_own_function_did(
    sizes: list[int], options: dict[str, int], ranges: list[tuple[int, int]], unpadded: list[int]
) -> None:
    """Run with DistributedOptimizer._compute_per_buffer_param_layout at d98e8a64dd."""
    assert partition.megatron_layout(sizes, **options) == (ranges, unpadded)  # type: ignore[arg-type]


@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=12),
    over=st.sampled_from((1, 2, 3, 8, 24, 96)),
    bucket_size=st.none() | st.integers(1, 6000),
)
def test_one_bucket_is_the_sum_of_aligned_sizes_and_shares_add_up(
    sizes: list[int], over: int, bucket_size: int | None
) -> None:
    starts, ranges, _ = partition.megatron_places(sizes, over, bucket_size=bucket_size)
    assert all(start % 64 == 0 for start in starts)
    assert all((end - start) % np.lcm(over, 128) == 0 for start, end in ranges)
    if bucket_size is not None:
        assert all(end - start >= bucket_size for start, end in ranges[:-1])
    else:
        aligned = sum(-(-size // 64) * 64 for size in sizes)
        assert partition.bucket_padded(np.array(aligned), np.array(over)) == ranges[0][1]
    held = [partition.bucket_of_rank(sizes, over, rank, bucket_size=bucket_size) for rank in range(over)]
    assert sum(held) == sum(sizes)
    assert max(held) <= ranges[-1][1] // over


@pytest.mark.parametrize(
    ("rows", "over", "chunks"),
    [
        (3, 8, [1, 1, 1, 0, 0, 0, 0, 0]),
        (10, 4, [3, 3, 3, 1]),
        (7, 3, [3, 3, 1]),
        (9, 4, [3, 3, 3, 0]),
        (5, 4, [2, 2, 1, 0]),
        (1, 5, [1, 0, 0, 0, 0]),
    ],
)
def test_dim_0_is_cut_as_torch_chunk_cuts(rows: int, over: int, chunks: list[int]) -> None:
    """The chunks that torch 2.13 gave; every rank stores as much as the first."""
    of_rank = partition.dim0_of_rank(np.array(rows), np.array(1), np.array(over), np.arange(over))
    assert of_rank.tolist() == chunks
    assert partition.dim0(np.array(rows), np.array(1), np.array(over)) == max(chunks)


def test_3_rows_on_8_ranks_store_8() -> None:
    """Padded dim 0 is ceil(3 / 8) x 8. [fsdp2: _fsdp_param.py 298-318]"""
    assert int(partition.dim0(np.array(3), np.array(1), np.array(8))) * 8 == 8


CUTS = ("dim0", "tensor", "flat")


def stored(cut: str, amount: int, over: int) -> int:
    """Elements one rank stores; along dimension 0 of rows of three."""
    whole, group = np.array(amount), np.array(over)
    if cut == "dim0":
        return int(partition.dim0(whole, np.array(3), group))
    return int(partition.per_tensor(whole, group) if cut == "tensor" else partition.flat(whole, group))


def parts(cut: str, amount: int, over: int) -> IntArray:
    """Elements that each rank holds of it."""
    whole, group, ranks = np.array(amount), np.array(over), np.arange(over)
    if cut == "dim0":
        return partition.dim0_of_rank(whole, np.array(3), group, ranks)
    if cut == "tensor":
        return partition.per_tensor_of_rank(whole, group, ranks)
    return partition.flat_of_rank(whole, group, ranks)


@pytest.mark.parametrize("cut", CUTS)
@given(amount=st.integers(1, 10**12), over=st.integers(1, 300))
def test_parts_of_all_ranks_add_up_and_the_largest_is_stored(cut: str, amount: int, over: int) -> None:
    held, kept = parts(cut, amount, over), stored(cut, amount, over)
    total = amount * (3 if cut == "dim0" else 1)
    assert int(held.sum()) == total
    assert int(held.max()) <= kept
    assert kept * over >= total
    if cut != "flat":
        assert int(held.max()) == kept


@pytest.mark.parametrize("cut", CUTS)
@given(amount=st.integers(1, 10**12), over=st.integers(1, 300), more=st.integers(2, 5))
def test_more_ranks_never_store_more(cut: str, amount: int, over: int, more: int) -> None:
    assert stored(cut, amount, over * more) <= stored(cut, amount, over)


@pytest.mark.parametrize(
    ("sizes", "buckets"),
    [([30 << 20, 2 << 20, 512], 2), ([512, 30 << 20, 2 << 20], 3), ([1000, 4, (25 << 20) - 4, 4, (1 << 20) - 4], 3)],
)
def test_ddp_closes_a_bucket_once_it_reaches_its_limit(sizes: list[int], buckets: int) -> None:
    """As torch 2.13's _compute_bucket_assignment_by_size with limits of 1 and 25 MiB, gradients arriving in reverse."""
    assert partition.ddp_bucket_count(sizes) == buckets


@pytest.mark.parametrize(
    ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "buckets"),
    [
        (128, 4, 4, 2, 352, 512, 2),
        (512, 6, 8, 4, 1408, 4096, 4),
        (768, 4, 12, 4, 2048, 32000, 5),
        (640, 9, 10, 2, 1700, 1000, 7),
    ],
)
def test_ddp_issues_the_buckets_that_were_counted(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, buckets: int
) -> None:
    """Counted with a communication hook from the second step on; the first step reduces one bucket. fp32 gradients."""
    model = dense(hidden, layers, heads, kv_heads, ffn, vocab)
    inventory = Inventory(setting_of(model, engine="pytorch", precision="fp32"))
    (reduction,) = [
        call
        for call in all_traffic(inventory, shares(inventory, plan_of(dp_shard=2, zero_stage=0)))
        if call.group == "dp" and call.count.any()
    ]
    assert (reduction.op, int(reduction.count[0, 0])) == ("all_reduce", buckets)
    assert int(reduction.in_bytes[0, 0]) == 4 * model.total_params


def test_dim_0_of_a_real_model_leaves_little_unused() -> None:
    for model in (llama("8b"), llama("70b"), tiny()):
        table = Inventory(setting_of(model, engine="pytorch")).table
        kept = partition.dim0(table.rows, table.rest, np.array(64)) * 64
        assert int((kept - table.rows * table.rest).max()) <= 64 * int(table.rest.max())


def test_a_chunk_factor_of_prime_row_sizes_stays_countable() -> None:
    rest = np.array([[99991, 99989, 99971, 99961]])
    assert partition.chunk_factor(rest, rest * 1_000_000).tolist() == [1 << 28]
