"""Tables that cannot be read are refused with line and column, and the little languages of their cells."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.errors import BadInput
from trainledger.scoring import predict_csv, score_csv
from trainledger.scoring.printed import cut_to, half_unit, is_formula, read_unit, rounds_to
from trainledger.scoring.table import load_table, parse_table, printed_number, table_kinds, whole_number
from trainledger.scoring.words import Unclear, read_count, read_largest_layer, read_precision, read_quantity, readings


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "t.csv is empty; give a CSV table"),
        ("\n\n", "t.csv is empty"),
        ("id,kind\n", "has column names and no row; add rows below line 1"),
        ("kind,dp\nx,1\n", "t.csv, line 1: no column is called id (found: kind, dp)"),
        ("A model is a sum of its parts.\n", "line 1: no column is called id"),
        ('{"id": 1, "kind": 2}\n', "line 1: no column is called id"),
        ("id,dp\nA,1\n", "line 1: a table has the column kind"),
        ("id,kind,num_gpus\nA,x,1\n", "and this one has both"),
        ("id,kind,dp,dp\nA,x,1,2\n", "line 1, column dp: two columns have that name"),
        ("id,kind\nA,x\nB,y\nA,z\n", "line 4, column id: 'A' stands on line 2 too"),
        ("id,kind\n,x\n", "line 2, column id: is blank"),
        ("id,kind,dp\nA,x,1\nB,x,eight\n", "line 3, column dp: 'eight' is not a whole number of at least 1"),
        ("id,kind,dp\nA,x,0\n", "line 2, column dp: '0' is not a whole number"),
        ("id,kind,n_params\nA,x,-7e9\n", "line 2, column n_params: '-7e9'"),
        ("id,kind,n_params\nA,x,1e999999\n", "line 2, column n_params"),
        ("id,kind,tp\nA,x,NaN\n", "line 2, column tp: 'NaN'"),
        ("id,kind,zero_stage\nA,x,1.5\n", "line 2, column zero_stage: '1.5' is not a whole number of at least 0"),
        ("id,num_gpus,tp\nA,8,two\n", "line 2, column tp: 'two'"),
        ("id,kind,dp\nA,x\n", "line 2: 2 cells under 3 column names; quote a cell that holds a comma"),
        ("id,kind\nA,x,8\n", "line 2: 3 cells under 2 column names"),
        ('id,kind\nA,"x\n\ny"\nB,"z\n', "line 5: not CSV"),
        ('id,kind\nA,"x"y\n', "line 2: not CSV"),
        ("id,kind\nA,x\0\n", "line 2: holds a zero byte"),
    ],
)
def test_a_table_that_is_none_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_table(text, where="t.csv")
    assert str(refused.value).startswith("t.csv")
    assert complaint in str(refused.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"absent\.csv cannot be read \(No such file or directory\)"):
        load_table(tmp_path / "absent.csv")
    with pytest.raises(BadInput, match="cannot be read"):
        load_table(tmp_path)
    binary = tmp_path / "b.csv"
    binary.write_bytes(b"id,kind\nA,x\nB,\xff\xfe\n")
    with pytest.raises(BadInput, match=r"line 3: not UTF-8 text"):
        load_table(binary)


def test_a_bad_outcome_is_refused_by_score_and_unseen_by_predict(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "id,source,kind,zero_stage,precision,unit,value_published,value_recomputed\n"
        "A,ZeRO paper,bytes per parameter,0,fp16,bytes/param,4 + 12,sixteen\n"
    )
    assert predict_csv(path)["rows"][0]["states"]["value"] == 16
    with pytest.raises(BadInput, match=r"t\.csv, line 2, column value_recomputed: 'sixteen' is not a number"):
        score_csv(path, "states")


def graded(folder: Path, published: str, recomputed: str) -> dict[str, object]:
    """The one row of a table, whose prediction is 2 + 2 + 12 bytes a parameter."""
    path = folder / "t.csv"
    path.write_text(
        "id,source,kind,zero_stage,precision,unit,value_published,value_recomputed\n"
        f"A,ZeRO paper,bytes per parameter,0,fp16,bytes/param,{published},{recomputed}\n"
    )
    return score_csv(path, "states")["rows"][0]


@pytest.mark.parametrize("text", ["4 + 12/d", "4+12/d", "(4 + 12)/d", "2P + 2P + 12P/Nd", "formula only"])
def test_a_formula_is_graded_by_what_it_was_worked_out_to_be(tmp_path: Path, text: str) -> None:
    assert is_formula(text)
    assert (graded(tmp_path, text, "16")["status"], graded(tmp_path, text, "17")["status"]) == ("match", "mismatch")
    assert graded(tmp_path, text, "")["status"] == "incomplete"


@pytest.mark.parametrize(
    "text", ["abc", "nan", "inf", "-inf", "50%", "", "-", "N/A", "16 GB", "~16", "7.7 / 11.9", "1_6", "d", "4 +"]
)
def test_a_print_that_cannot_be_read_is_graded_by_nothing_else(tmp_path: Path, text: str) -> None:
    row = graded(tmp_path, text, "16")
    assert (row["status"], row["measured"], row["log_ratio"]) == ("incomplete", None, None)
    assert row["predicted"] == 16
    assert (repr(text) if text else "blank") in str(row["reason"])


@pytest.mark.parametrize(
    "text", ["1e999999999", "-1e999999999", "1e5000", "0e999999999", "1e-999999999", "1e31", "1e-31", "9" * 5000]
)
def test_a_figure_beyond_all_figures_is_not_computed_with(tmp_path: Path, text: str) -> None:
    for row in (graded(tmp_path, text, "16"), graded(tmp_path, "4 + 12/d", text)):
        assert (row["status"], row["measured"]) == ("incomplete", None)
        assert "beyond 1e30" in str(row["reason"])
    assert graded(tmp_path, "1e30", "")["status"] == graded(tmp_path, "1e-30", "")["status"] == "mismatch"


def test_a_formula_is_read_in_one_go() -> None:
    assert not is_formula("2*d*" * 5000 + "%")


def test_lines_are_counted_over_quoted_line_ends_and_blank_lines() -> None:
    table = parse_table('\ufeffid,kind\r\nA,"x\r\ny"\r\n\r\nB,z\u2028w\r\n'.removeprefix("\ufeff"), where="t.csv")
    assert [(row.id, row.line, row.inputs["kind"]) for row in table.rows] == [("A", 2, "x\r\ny"), ("B", 5, "z\u2028w")]


def test_columns_that_nobody_reads_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,kind,colour,note\nA,x,blue,n\n")
    assert predict_csv(path)["ignored_columns"] == ["colour"]
    assert score_csv(path, "states")["ignored_columns"] == ["colour"]


def runs_table(path: Path, filler: str) -> Path:
    """Two runs with every column; outcomes hold the filler."""
    columns = table_kinds()["runs"]
    names = [*columns.inputs, *(name.replace("*", "flag") for name in columns.outcomes)]
    numbers = {*columns.whole, *columns.flags}
    cells = ["1" if name in numbers else filler if columns.is_outcome(name) else "x" for name in names]
    lines = [",".join(["id", *names]), *(",".join([row, *cells]) for row in ("AB-001", "CD-001"))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_runs_are_read_and_none_is_dropped(tmp_path: Path) -> None:
    path = runs_table(tmp_path / "runs.csv", "1.5")
    said = predict_csv(path)
    assert [(row["id"], row["status"]) for row in said["rows"]] == [
        ("AB-001", "unsupported"),
        ("CD-001", "unsupported"),
    ]
    assert all(row["reason"] for row in said["rows"])
    assert "ignored_columns" not in said
    assert json.dumps(said) == json.dumps(predict_csv(runs_table(tmp_path / "blank.csv", "")))
    scored = score_csv(path, "states")
    assert list(scored["sources"]) == ["AB", "CD"]
    assert scored["rows"][0]["tier"] == "x"
    assert scored["overall"]["scored"] == 0


@given(st.fractions(0, 10**5), st.integers(-3, 3))
def test_a_print_shows_its_value_and_its_cut(value: Fraction, digits: int) -> None:
    step = Fraction(10) ** -digits
    low = value // step * step
    down, up = (
        Decimal((0, (int(at / step),), 0) if at / step < 10 else str(int(at / step))).scaleb(-digits)
        for at in (low, low + step)
    )
    assert Fraction(down) == low
    assert cut_to(value, down)
    assert not cut_to(value, up)
    assert rounds_to(value, down) == (value - low <= step / 2)
    assert rounds_to(value, up) == (low + step - value <= step / 2)


@pytest.mark.parametrize(
    ("text", "half"), [("31.4", "0.05"), ("120", "0.5"), ("0.12", "0.005"), ("1.2e4", "500"), ("30.0", "0.05")]
)
def test_half_a_unit_of_the_last_digit(text: str, half: str) -> None:
    printed = printed_number(text)
    assert printed is not None
    assert half_unit(printed) == Fraction(half)


@pytest.mark.parametrize("text", ["", "4 + 16/d", "formula only", "1_000", "Infinity", "nan", "7.7 / 11.9", "\u0663"])
def test_what_is_no_number(text: str) -> None:
    assert printed_number(text) is None
    assert whole_number(text) is None


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("GB (1e9)", 10**9),
        ("GB printed (2^30)", 2**30),
        ("GiB", 2**30),
        ("MiB", 2**20),
        ("bytes", 1),
        ("B", 1),
        ("MB (2^20)", 2**20),
    ],
)
def test_units_that_say_how_large_they_are(text: str, size: int) -> None:
    assert read_unit(text).size == size
    assert not read_unit(text).per_param


@pytest.mark.parametrize("text", ["GB", "MB", "", "%", "M params", "1e9 params", "GB (about)"])
def test_units_that_do_not_are_refused(text: str) -> None:
    with pytest.raises(Unclear, match="does not say how many bytes it is"):
        read_unit(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fp16 mixed, Adam K=12", {"dtype": "fp16", "optimizer": "adamw", "k": Decimal(12)}),
        ("`fp16` parameters, `fp16` gradients", {"weights": "fp16", "gradients": "fp16"}),
        ("BF16 param, FP32 grads", {"weights": "bf16", "gradients": "fp32"}),
        ("fp16 param fp32 gradients", {"weights": "fp16", "gradients": "fp32"}),
        ("grads fp32; params bf16", {"weights": "bf16", "gradients": "fp32"}),
        (
            "bf16 main grads, fp32 main params, bf16 optimizer states",
            {"gradients": "bf16", "master": "fp32", "moments": "bf16"},
        ),
        ("precision-aware optimizer: bf16 exp_avg and bf16 exp_avg_sq", {"aware": True, "moments": "bf16"}),
        ("mixed precision fp16 with SGD, K = 8", {"dtype": "fp16", "optimizer": "sgd", "k": Decimal(8)}),
    ],
)
def test_words_of_precision(text: str, said: dict[str, object]) -> None:
    read = read_precision(text)
    empty = read_precision("")
    for field in ("dtype", "weights", "gradients", "master", "moments", "optimizer", "k", "aware"):
        assert getattr(read, field) == said.get(field, getattr(empty, field))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("fp16 flux", "has the word 'flux'"),
        ("fp16, bf16", "states dtype twice, as fp16 and as bf16"),
        ("fp32 grads, bf16 grads", "states gradients twice"),
        ("bf16 exp_avg, fp32 exp_avg_sq", "states moments twice"),
        ("grads", "names gradients without a dtype"),
    ],
)
def test_words_of_precision_that_do_not_decide(text: str, complaint: str) -> None:
    with pytest.raises(Unclear, match=complaint):
        read_precision(text)


def test_words_of_quantity() -> None:
    assert read_quantity("params+grads+optimizer").categories == ()
    assert read_quantity("grads + params").categories == ("gradients", "weights")
    assert read_quantity("per GPU; offload_param=cpu, offload_optimizer=nvme").offload == ("optimizer", "parameters")
    assert read_quantity("per CPU; offload_optimizer=none").host
    assert read_quantity("case 2 gpu memory").offload == ("optimizer", "parameters")
    for text in ("activations", "offload_optimizer=tape"):
        with pytest.raises(Unclear, match="quantity"):
            read_quantity(text)


def test_words_of_model() -> None:
    assert [
        read_count(text) for text in ("7.5B", "1T", "t5-3b (2851M)", "GPT-3 175B", "llama-3-70b", "1B of 7B", "13b")
    ] == [7_500_000_000, 10**12, 2_851_000_000, 175 * 10**9, None, None, None]
    assert read_largest_layer("x (737.67M, largest layer 32.90M)") == 32_900_000
    assert read_largest_layer("largest layer params: 2B") == 2 * 10**9
    assert read_largest_layer("t5-3b (2851M)") is None


def test_every_reading_has_its_source_and_reason() -> None:
    for source in readings().source:
        assert source.reason
        assert source.cite
