"""Which file of an engine answers for a release that is named by a number, a day or a month."""

from itertools import pairwise

import pytest

from trainledger.errors import BadInput
from trainledger.profiles import load_profile, releases


@pytest.mark.parametrize(
    ("release", "read"),
    [
        ("", "b5bcd76"),
        ("b5bcd76", "b5bcd76"),
        ("2026-08", "b5bcd76"),
        ("2026-06-24", "b5bcd76"),
        ("2026-05", "2026-04-06"),
        ("2026-03", "2026-03-23"),
        ("2026-02", "2026-01-27"),
        ("2026-01-26", "2025-12-01"),
        ("2025-12", "2025-12-01"),
        ("2025-11", "2025-11-21"),
        ("2025-11-20", "2025-09-01"),
        ("2025-08", "2025-07-28"),
        ("2025-07-28", "2025-07-28"),
        ("2025-07-27", "2025-04-02"),
        ("2025-06", "2025-04-02"),
        ("2025-03", "2024-12-18"),
        # a month is its end: what is published in it was read from the newest code
        ("2024-12", "2024-12-18"),
        ("2024-12-01", "2024-10-22"),
        ("2024-08", "2024-04-16"),
    ],
)
def test_torchtitan_is_known_by_days(release: str, read: str) -> None:
    assert load_profile("torchtitan", release).framework_version == read


@pytest.mark.parametrize(
    ("release", "read"),
    [
        ("0.1.0", "2025-04-02"),
        ("v0.1.0", "2025-04-02"),
        ("0.2.0", "2025-09-01"),
        ("0.2.1", "2025-12-01"),
        ("0.2.2", "2026-01-27"),
        ("0.3", "b5bcd76"),
    ],
)
def test_a_number_stands_for_the_day_of_its_release(release: str, read: str) -> None:
    assert load_profile("torchtitan", release).framework_version == read


@pytest.mark.parametrize(
    ("engine", "release"),
    [
        ("torchtitan", "2023-12"),
        ("torchtitan", "0.0.1"),
        ("torchtitan", "main"),
        ("deepspeed-estimator", "2025-01"),
        # no calendar has these
        ("torchtitan", "2025-13"),
        ("torchtitan", "2025-00"),
        ("torchtitan", "2026-02-30"),
        ("torchtitan", "2025-06-31"),
        ("torchtitan", "2025-06-00"),
        ("torchtitan", "0000-06-01"),
        ("megatron", "9" * 5000),
        # digits of another script
        ("torchtitan", "\u0662\u0660\u0662\u0665-06-01"),
    ],
)
def test_what_no_file_covers_is_refused_with_what_is_known(engine: str, release: str) -> None:
    with pytest.raises(BadInput, match=release) as said:
        load_profile(engine, release)
    assert load_profile(engine).framework_version in str(said.value)


def test_ranges_of_days_follow_one_another() -> None:
    profiles = [profile for profile in releases("torchtitan") if profile.from_version]
    for newer, older in pairwise(profiles):
        assert older.before_version == newer.from_version
    assert not profiles[0].before_version


def test_a_file_is_laid_over_its_base_key_by_key() -> None:
    newest, before = load_profile("torchtitan"), load_profile("torchtitan", "2025-12")
    assert before.memory.copies_kv
    assert not newest.memory.copies_kv
    assert (before.memory.passing, before.state, before.precision) == ("fsdp2", newest.state, newest.precision)


def test_the_loss_was_compiled_but_for_the_winter_of_2024() -> None:
    compiled = {
        day: bool(load_profile("torchtitan", day).memory.compiled_loss) for day in ("2024-11", "2025-02", "2025-04")
    }
    assert compiled == {"2024-11": True, "2025-02": False, "2025-04": True}
