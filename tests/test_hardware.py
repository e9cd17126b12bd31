"""The hardware data: every file loads, every figure is plausible and sourced, every name of the run table joins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainledger.errors import BadInput, MissingFact, UnknownName
from trainledger.facts.cluster import (
    Accelerator,
    Cluster,
    accelerator_names,
    cluster_names,
    find_accelerator,
    find_cluster,
    load_accelerator,
    load_cluster,
)
from trainledger.facts.load import DATA, Fact, load_toml

ACCELERATORS = accelerator_names()
CLUSTERS = cluster_names()

# The distinct accelerator names of the table of published runs, and how many of its 703 rows carry each.
RUN_TABLE = {
    "A100-SXM-80GB": ("A100-SXM4-80GB", 202),
    "H100-SXM-80GB": ("H100-SXM5-80GB", 175),
    "GB200": ("GB200", 86),
    "A100-SXM-40GB": ("A100-SXM4-40GB", 45),
    "GB300": ("GB300", 42),
    "A100-SXM": ("A100-SXM4-80GB", 40),
    "B200": ("B200-SXM", 26),
    "H100-SXM-96GB-HBM2e": ("H100-SXM-96GB-HBM2e", 24),
    "B200-SXM-180GB": ("B200-SXM", 21),
    "B300": ("B300-SXM", 13),
    "MI355X": ("MI355X", 8),
    "H100-SXM": ("H100-SXM5-80GB", 7),
    "A800-SXM-80GB": ("A800-80GB", 5),
    "MI300X": ("MI300X", 4),
    "H200-SXM-141GB": ("H200-SXM5-141GB", 4),
    "RTX-Pro-6000": ("RTX-PRO-6000", 1),
}


def stated(facts: dict[str, Fact], *keys: str) -> list[float] | None:
    """The values of all these keys, or None where one is not stated or is `false`."""
    if any(key not in facts or facts[key].value is False for key in keys):
        return None
    return [float(facts[key].value) for key in keys]


@pytest.mark.parametrize("name", ACCELERATORS)
def test_an_accelerator_is_plausible(name: str) -> None:
    card = find_accelerator(name)
    facts = card.facts
    if pair := stated(facts, "peak.bf16", "memory.bandwidth"):
        # torchao's RTX 5090, whose bandwidth is 1000 times too large, gives 0.117.
        assert 30 < pair[0] / pair[1] < 1000
    if pair := stated(facts, "peak.fp8", "peak.bf16"):
        assert pair[0] / pair[1] == pytest.approx(2, rel=0.02)
    if pair := stated(facts, "peak.bf16", "peak.fp16"):
        assert pair[0] == pytest.approx(pair[1], rel=0.001)
    if pair := stated(facts, "peak.bf16", "peak.tf32"):
        assert pair[0] / pair[1] == pytest.approx(2, rel=0.02)
    if pair := stated(facts, "link.one_way", "memory.bandwidth"):
        assert pair[0] < pair[1]
    if pair := stated(facts, "memory.usable", "memory.reported"):
        assert 0.97 < pair[0] / pair[1] < 1
    if pair := stated(facts, "memory.nominal", "memory.reported"):
        assert pair[0] == pytest.approx(pair[1], rel=0.08)
    if pair := stated(facts, "memory.nominal", "memory.usable"):
        assert pair[0] == pytest.approx(pair[1], rel=0.08)
    assert any(key.startswith("peak.") for key in facts)


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_is_plausible(name: str) -> None:
    cluster = find_cluster(name)
    assert cluster.gpus_per_node in (4, 8)
    assert cluster.scale_up_domain in (1, 8, 72)
    # A rack-scale domain is what Grace-Blackwell cards have, and nothing else here has.
    assert (cluster.scale_up_domain == 72) == cluster.accelerator.name.startswith("GB")
    if cluster.scale_up_domain > 1:
        # A node's own figure may not differ from its card's: both are the same wires.
        assert cluster.scale_up_bytes_per_s == cluster.accelerator.link_bytes_per_s
    else:
        with pytest.raises(BadInput, match="no scale-up link"):
            _ = cluster.scale_up_bytes_per_s
    if "inter.one_way" in cluster.facts or "inter.nics" in cluster.facts:
        assert cluster.inter_bytes_per_s < cluster.scale_up_bytes_per_s / 3


@pytest.mark.parametrize("name", ACCELERATORS + CLUSTERS)
def test_every_fact_says_where_it_comes_from(name: str) -> None:
    thing: Accelerator | Cluster = find_accelerator(name) if name in ACCELERATORS else find_cluster(name)
    for fact in thing.facts.values():
        assert fact.source.startswith(("https://", "github.com/")), fact
        assert fact.basis != "assumed", fact
        assert "@" in fact.source or not fact.source.startswith("github.com/") or fact.date, fact


@pytest.mark.parametrize("folder", ["accelerators", "clusters"])
def test_every_name_leads_to_one_file(folder: str) -> None:
    find = find_accelerator if folder == "accelerators" else find_cluster
    index = load_toml(DATA / folder / "index.toml")
    stems = {path.stem for path in (DATA / folder).glob("*.toml")} - {"index"}
    assert set(index) == stems
    assert stems == set(ACCELERATORS if folder == "accelerators" else CLUSTERS)
    names = [stem.lower() for stem in stems] + [alias for aliases in index.values() for alias in aliases]
    assert len(names) == len(set(names))
    for stem, aliases in index.items():
        for alias in (stem, stem.upper(), *aliases, *(alias.title() for alias in aliases)):
            assert find(alias).name == stem
        assert find(stem).aliases == tuple(aliases)
        assert all(alias == alias.lower().strip() for alias in aliases)


def test_every_name_of_the_run_table_joins() -> None:
    assert sum(count for _, count in RUN_TABLE.values()) == 703
    for name, (expected, _) in RUN_TABLE.items():
        assert find_accelerator(name).name == expected


def test_figures_that_sources_disagree_on() -> None:
    """The verdicts: what each wrong source says is at the right."""
    assert find_accelerator("b200").memory_bytes_per_s == pytest.approx(7.67e12, rel=1e-3)  # 8.0e12: 8192-bit bus
    assert find_accelerator("gb200").peak_flop_per_s("bf16") == 2.5e15  # 2.25e15: the B200's
    assert find_accelerator("h200").fact("memory.reported").value == 143_771 * 2**20  # 141 * 1024 MiB
    assert find_accelerator("b300").peak_flop_per_s("int8") < 1e15  # 4.5e15: INT8 of the B200
    assert find_accelerator("h100-nvl").peak_flop_per_s("bf16") == 835e12  # 989e12: the SXM card's
    assert find_accelerator("mi355x").peak_flop_per_s("fp8") == 5033e12  # 10.1e15: sparse
    assert find_accelerator("rtx5090").memory_bytes_per_s == 1.792e12  # 1.792e15
    assert find_cluster("dgx-b200").inter_bytes_per_s == 50e9  # 100e9: the DGX B300's
    assert find_cluster("p6e-gb200").inter_bytes_per_s == 50e9  # 100e9: the instance table


def test_usable_memory_is_logged_or_else_assumed_and_says_so() -> None:
    h100 = find_accelerator("h100")
    assert h100.usable.basis == "device log"
    assert h100.usable_bytes == 84_942_979_072
    b300 = find_accelerator("b300")
    assert b300.usable.basis == "assumed"
    assert b300.usable_bytes == 275_040 * 2**20 - 11 * 2**30 // 10
    assert "275040 MiB" in b300.usable.note
    # A PyTorch log of a B300 prints 267.69 GiB: the assumption is below it, by less than a quarter GiB.
    assert 0 < 267.69 * 2**30 - b300.usable_bytes < 2**28


def test_a_fact_that_no_source_states_is_missed_by_file_and_key() -> None:
    with pytest.raises(
        MissingFact, match=r"^data/accelerators/H800-SXM5-80GB\.toml has no memory\.usable: .*add memory\.usable"
    ):
        _ = find_accelerator("h800").usable_bytes
    with pytest.raises(MissingFact, match=r"^data/accelerators/V100-SXM2-16GB\.toml has no peak\.fp8"):
        find_accelerator("v100-16gb").supports("fp8")
    with pytest.raises(MissingFact, match=r"^data/clusters/mi300x-8x\.toml has no inter\.one_way"):
        _ = find_cluster("mi300x").inter_bytes_per_s


@pytest.mark.parametrize(
    ("name", "torch_gib", "bf16"),
    [
        # what PyTorch says of the card as it runs out, in public reports
        ("t4", 14.56, False),  # https://github.com/AlphaGPU/leetgpu-challenges/issues/52
        ("a10g", 21.99, True),  # https://github.com/mistralai/mistral-finetune/issues/69
        ("l4", 21.95, True),  # github.com/thamada/nvidia-smi gls/L4_deviceQuery.py: 23570219008 bytes
        ("3090", 23.69, True),  # https://github.com/ucwxb/GraphAvatar/issues/4
        ("a40", 44.34, True),  # github.com/thamada/nvidia-smi gls/A40x10_deviceQuery.py: 47608692736 bytes
        ("rtx 6000 ada", 47.48, True),  # https://github.com/pytorch/torchtitan/issues/620
        ("mi355x", 287.98, True),  # https://github.com/ROCm/TheRock/issues/2118
    ],
)
def test_cards_of_workstations_and_clouds_have_what_pytorch_says(name: str, torch_gib: float, bf16: bool) -> None:
    card = find_accelerator(name)
    assert card.usable_bytes == pytest.approx(torch_gib * 2**30, rel=0.005)
    assert card.supports("bf16") == bf16


def test_hardware_that_lacks_a_format_is_not_a_missing_fact() -> None:
    v100 = find_accelerator("v100")
    assert not v100.supports("bf16")
    with pytest.raises(BadInput, match="V100-SXM2-32GB has no bf16 arithmetic: choose one of fp64, fp32, fp16"):
        v100.peak_flop_per_s("bf16")
    assert find_accelerator("a100").supports("bf16")
    with pytest.raises(UnknownName, match=r"'bfloat16' is not a known format of arithmetic; nearest: .*fp16"):
        v100.supports("bfloat16")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("A100 80GB", "A100-SXM4-80GB"),
        ("A100_80GB", "A100-SXM4-80GB"),
        ("Tesla V100", "V100-SXM2-32GB"),
        ("GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA A10", "A10G"),
        ("H100 80GB HBM3", "H100-SXM5-80GB"),
        ("Instinct MI300X", "MI300X"),
    ],
)
def test_a_card_is_found_as_people_write_it(written: str, name: str) -> None:
    assert find_accelerator(written).name == name


def test_an_unknown_name_brings_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"'h1000' is not a known accelerator; nearest: .*h100"):
        find_accelerator("h1000")
    with pytest.raises(UnknownName, match=r"not a known cluster; nearest: .*dgx-h100.* give the path of a \.toml file"):
        find_cluster("dgxh100")
    with pytest.raises(BadInput, match=r"^none\.toml: there is no such file"):
        find_accelerator("none.toml")


CARD = """
name = "mine"
vendor = "acme"
[peak]
bf16 = { value = "100 TFLOP/s", basis = "measured", source = "my bench" }
[memory]
bandwidth = { value = "1 TB/s", basis = "datasheet", source = "my sheet", checked = 2026-08-22 }
"""
NODE = """
name = "my-node"
accelerator = { value = "mine.toml", basis = "measured", source = "here" }
gpus_per_node = { value = 4, basis = "measured", source = "here" }
[scale_up]
domain = { value = 4, basis = "measured", source = "here" }
one_way = { value = "100 GB/s", basis = "measured", source = "here" }
[inter]
nics = { value = 2, basis = "measured", source = "here" }
nic_rate = { value = "200 Gbit/s", basis = "measured", source = "here" }
"""


def test_a_users_own_files_have_the_same_schema(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(CARD, encoding="utf-8")
    (tmp_path / "node.toml").write_text(NODE, encoding="utf-8")
    node = find_cluster(str(tmp_path / "node.toml"))
    assert (node.name, node.accelerator.name, node.accelerator.peak_flop_per_s("bf16")) == ("my-node", "mine", 1e14)
    assert node.inter_bytes_per_s == 12.5e9
    assert (node.inter.basis, node.inter.note) == ("derived", "2 network cards of 200 Gbit/s over 4 devices")
    with pytest.raises(MissingFact, match=rf"^{tmp_path}/mine\.toml has no memory\.nominal"):
        _ = node.accelerator.nominal_bytes


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("100 TFLOP/s", "100 TB/s", r"peak\.bf16\.value: '100 TB/s' is in TB/s, which does not fit here.*GFLOP/s"),
        ("100 TFLOP/s", "100 tflops", r"peak\.bf16\.value: '100 tflops' is not a quantity"),
        ("100 TFLOP/s", "-100 TFLOP/s", r"peak\.bf16\.value: '-100 TFLOP/s' is negative"),
        ("100 TFLOP/s", "0 TFLOP/s", r"peak\.bf16\.value is '0 TFLOP/s': it must be above zero"),
        ('"100 TFLOP/s"', "100", r"peak\.bf16\.value is 100: write a string in quotes, or false"),
        ('"1 TB/s"', "false", r"memory\.bandwidth\.value is False: write a string in quotes$"),
        ('"1 TB/s"', "inf", r"memory\.bandwidth\.value is inf"),
        ('basis = "measured"', 'basis = "guess"', r"peak\.bf16\.basis is 'guess': write one of datasheet, device log"),
        (', source = "my bench"', "", r"peak\.bf16 has no source"),
        ('source = "my bench"', 'source = " "', r"peak\.bf16: source is ' '"),
        ("checked = 2026-08-22", 'checked = "2026"', r"memory\.bandwidth\.checked is '2026': write a date"),
        ("bf16 =", "bf17 =", r"\[peak\]: bf17 is not a known key; known: fp64, fp32"),
        ("[memory]", "[storage]", r"storage is not a known key; known: peak, memory"),
        ("[memory]", "[peak]\n[memory]", r"is not valid TOML"),
        ("[memory]", "[memory]\nbandwidth = 1", r"is not valid TOML"),
        ("bf16 = {", "bf16 = { value = 1,", r"is not valid TOML"),
        ("[peak]", "peak = 3 #", r"peak is 3: write it as a section \[peak\] of facts"),
        ('vendor = "acme"', "", r"has no vendor: add vendor"),
        ('name = "mine"', "name = 3", r"name is 3: write a string"),
        ("[peak]", "price = 3\n[peak]", r"price is not a known key"),
        (CARD, "a = " + "[" * 9999, r"is not valid TOML"),
    ],
)
def test_a_hostile_file_is_refused_with_file_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    assert old in CARD
    path.write_text(CARD.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(BadInput, match=message) as caught:
        load_accelerator(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("value = 4,", "value = 0,", r"gpus_per_node\.value is 0: write a whole number between 1 and 1048576"),
        ("value = 4,", "value = true,", r"gpus_per_node\.value is True"),
        ("domain = { value = 4", "domain = { value = 6", "one must be a multiple of the other"),
        ('domain = { value = 4, basis = "measured", source = "here" }', "", r"has no scale_up\.domain"),
        ("mine.toml", "no-such-card", "'no-such-card' is not a known accelerator"),
        ("mine.toml", "gone.toml", r"gone\.toml: there is no such file"),
    ],
)
def test_a_hostile_cluster_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    (tmp_path / "mine.toml").write_text(CARD, encoding="utf-8")
    (tmp_path / "node.toml").write_text(NODE.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(BadInput, match=message):
        load_cluster(tmp_path / "node.toml")


def test_bytes_that_are_not_text_and_figures_that_contradict_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(BadInput, match="is not UTF-8 text"):
        load_accelerator(path)
    fact = '{{ value = "{} GiB", basis = "log", source = "x" }}'
    both = f"usable = {fact.format(90)}\nreported = {fact.format(80)}"
    path.write_text(f"{CARD}{both}\n", encoding="utf-8")
    with pytest.raises(BadInput, match=r"memory\.usable \(90 GiB\) is above memory\.reported \(80 GiB\)"):
        load_accelerator(path)


def test_one_lookup_reads_one_file_and_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    read_text = Path.read_text

    def noted(path: Path, encoding: str) -> str:
        read.append(path.name)
        return read_text(path, encoding=encoding)

    monkeypatch.setattr(Path, "read_text", noted)
    find_cluster("dgx-h100")
    assert set(read) - {"index.toml"} == {"dgx-h100.toml", "H100-SXM5-80GB.toml"}
    code = (
        "import time, trainledger.facts.cluster as c; s = time.perf_counter(); c.find_cluster('h100'); "
        "print(time.perf_counter() - s)"
    )
    command, paths = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(DATA.parent.parent)}
    times = [
        float(subprocess.run(command, env=paths, capture_output=True, text=True, check=True).stdout) for _ in range(3)
    ]
    assert min(times) < 0.02
