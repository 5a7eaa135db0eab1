"""Plants one realistic mistake at a time in a copy of the package and sees that the tests notice.

    python tests/mutants/mutants.py [FOLDER]

Each mutant is one substitution of text. It gets a copy of the package of its own, which is what the tests then import; they run in a fork of
this process, so that what all of them need is imported only once, and without compiling, which the same source does as well. A mutant is dead
when a test that the untouched package passes fails: an error while importing or collecting does not count.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

GOLDEN = ("layout/test_golden_layout.py",)
MOE = (
    "layout/test_moe_layout.py::test_the_scale_order_follows_from_the_k_of_each_gemm",
    "layout/test_moe_layout.py::test_k_counts_with_its_padding",
    "layout/test_moe_layout.py::test_padding_is_zero_words_and_zero_scales_at_the_end_of_each_half",
    "layout/test_moe_layout.py::test_stored_shapes_of_the_published_model",
    "layout/test_moe_layout.py::test_what_the_kernel_cannot_run",
    "layout/test_moe_layout.py::test_other_sizes_and_groups",
)
PLAN = ("planning/test_output_plan.py", "planning/test_plan_refusals.py")
SHARDS = (
    "shards/test_file_format.py::test_every_promise",
    "shards/test_file_format.py::test_order",
    "shards/test_file_format.py::test_fused_views",
)
BATCH = ("layout/test_moves.py::test_a_batch_is_each_slice_alone[shape0-0-False-False]",)
PARTS = ("layout/test_moves.py::test_parts_of_slices",)
ONCE = ("layout/test_moves.py::test_parts_are_all_of_a_slice_once",)
WRONG = ("layout/test_moves.py::test_a_wrong_slice_is_named_while_packing",)
EXACT = ("pipeline/test_exact_check.py",)
WHOLE = ("mutants/one_conversion.py",)


@dataclass(frozen=True)
class Mutant:
    """`old` stands once in `file` and becomes `new`; `tests` must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    # words
    Mutant("nibbles shifted by 8", "layout/words.py", "_4, _8, _16, _32 = (np.uint64(n) for n in (4, 8, 16, 32))",
           "_4, _8, _16, _32 = (np.uint64(n) for n in (8, 8, 16, 32))", GOLDEN),
    Mutant("rows n+8 and n+16 exchanged", "layout/words.py", "_mix(n0[k], n8[k], n16[k], n24[k])", "_mix(n0[k], n16[k], n8[k], n24[k])", GOLDEN),
    Mutant("words of j and j+1 exchanged", "layout/words.py", "words[i, k], words[i + 2, k], words[i + 4, k], words[i + 6, k] = _mix(",
           "words[i + 2, k], words[i, k], words[i + 4, k], words[i + 6, k] = _mix(", GOLDEN),
    Mutant("odd j before even j", "layout/words.py", "low_even, low_odd = swap(low, low8, _BYTES, _8)",
           "low_odd, low_even = swap(low, low8, _BYTES, _8)", GOLDEN),
    Mutant("long rows: the first run of k-tiles again", "layout/words.py", "_block_to_words(source, s_base + block * s_stride + first, s_stride,",
           "_block_to_words(source, s_base + block * s_stride, s_stride,", ("layout/test_words.py::test_rows_longer_than_what_is_handled_together",)),
    Mutant("check looks at rows of the first block only", "layout/words.py", "base = s_base + block * s_stride + first", "base = s_base + first",
           ("layout/test_golden_layout.py::test_moe_layer",)),
    Mutant("every slice of a batch from the first source", "layout/words.py", "pack_words(source, table[i, 0],",
           "pack_words(source, table[0, 0],", BATCH),
    Mutant("parts of a slice all to its first columns", "layout/moves.py", "table[:, 4] += first * table[:, 7] // table[:, 2]", "pass", PARTS),
    Mutant("parts of a slice all from its first rows", "layout/moves.py", "table[:, 0] += first * table[:, 1]", "pass", PARTS),
    Mutant("the last part of a slice is left out", "layout/moves.py", "parts = -(-rows // step)", "parts = np.maximum(rows // step - 1, 1)", PARTS),
    Mutant("parts may lie on each other", "layout/moves.py", "if not beside.all() or (begin + width > first + stride).any():", "if False:", ONCE),
    Mutant("parts may be missing", "layout/moves.py", "minlength=len(whole)) != whole[:, 2]).any():", "minlength=len(whole)) < 0).any():", ONCE),
    Mutant("a part that differs is forgotten", "layout/words.py", "wrong = i if wrong < 0 else wrong", "wrong = -1", WRONG),
    Mutant("a scale part that differs is forgotten", "layout/scales.py", "wrong = i if wrong < 0 else wrong", "wrong = -1", WRONG),
    Mutant("nothing is checked while packing", "layout/words.py", "if check and first_wrong_word(", "if not check and first_wrong_word(", WRONG),
    # scales
    Mutant("i and j exchanged in the grouped order", "layout/scales.py", "[i + 8 * j for i in range(8) for j in range(8)]",
           "[8 * i + j for i in range(8) for j in range(8)]", GOLDEN),
    Mutant("single order without its step", "layout/scales.py", "(0, 1, 8, 9, 16, 17, 24, 25)", "(0, 8, 1, 9, 16, 24, 17, 25)", GOLDEN),
    Mutant("a group of all of K takes the grouped order", "layout/scales.py", "0 < group_size < size_k", "0 < group_size <= size_k", MOE),
    Mutant("one group per channel takes the grouped order", "layout/scales.py", "0 < group_size < size_k", "group_size < size_k", GOLDEN),
    Mutant("every scale slice of a batch to the first place", "layout/scales.py",
           "pack_scale_words(source, table[i, 0], table[i, 1], table[i, 2], table[i, 3], marlin, table[i, 4],",
           "pack_scale_words(source, table[i, 0], table[i, 1], table[i, 2], table[i, 3], marlin, table[0, 4],", BATCH),
    # w13 and w2
    Mutant("gate and up exchanged", "layout/moe.py", 'half if projection == "up_proj" else 0', 'half if projection == "gate_proj" else 0', GOLDEN),
    Mutant("K of w2 before padding", "layout/moe.py",
           'self.padded(shape) if projection == "down_proj"', 'shape.local if projection == "down_proj"', MOE),
    Mutant("K of w2 is that of w13", "layout/moe.py",
           'self.padded(shape) if projection == "down_proj"', 'shape.hidden if projection == "down_proj"', MOE),
    Mutant("no padding", "layout/moe.py", "return -(-shape.local // unit) * unit", "return shape.local", MOE),
    Mutant("padding is not zero", "layout/moe.py", "copy = np.zeros(", "copy = np.ones(", MOE),
    Mutant("always the first rows", "layout/moe.py", "source.part(index * rows, rows, 0, source.cols)", "source.part(0, rows, 0, source.cols)", MOE),
    Mutant("columns of the next slice", "layout/moe.py", "source.part(0, source.rows, index * cols, cols)",
           "source.part(0, source.rows, (index + 1) % shape.moe_tp * cols, cols)", MOE),
    Mutant("a slice may cut a group", "layout/moe.py", "if shape.local % shape.group_size:", "if shape.intermediate % shape.group_size:", MOE),
    Mutant("down is cut along its outputs", "layout/protocol.py", 'return 1 if projection == "down_proj" else 0', "return 0", MOE),
    # who owns what
    Mutant("expert groups run fastest", "planning/topology.py", "return rank % self.moe_tp", "return rank // self.ep", WHOLE),
    Mutant("experts dealt out in turn", "planning/topology.py", "return rank // self.moe_tp", "return rank % self.ep", WHOLE),
    Mutant("expert range begins one late", "planning/topology.py", "range(self.ep_rank(rank) * local,",
           "range(self.ep_rank(rank) * local + 1,", PLAN),
    Mutant("any ep will do", "planning/topology.py", "if tp < 1 or ep < 1 or tp % ep:", "if tp < 1 or ep < 1:", PLAN),
    # rules
    Mutant("o_proj cut along its rows", "planning/rules.toml", 'shape = ["hidden", "v_heads"]\nrule = "row"',
           'shape = ["hidden", "v_heads"]\nrule = "column"', PLAN),
    Mutant("router cut", "planning/rules.toml", 'shape = ["experts", "hidden"]\nrule = "replicate"',
           'shape = ["experts", "hidden"]\nrule = "column"', PLAN),
    Mutant("lm_head on every rank", "planning/rules.toml", 'name = "lm_head.weight"\nscope = "top"\nshape = ["vocab", "hidden"]\nrule = "vocab"',
           'name = "lm_head.weight"\nscope = "top"\nshape = ["vocab", "hidden"]\nrule = "replicate"', PLAN),
    Mutant("heads may be cut", "planning/rules.py", "if extent % unit or (extent // unit) % topology.tp:", "if extent % topology.tp:", PLAN),
    Mutant("unknown tensors are left out", "planning/rules.py", "    _refuse_unknown(source, seen)\n    return units", "    return units", PLAN),
    Mutant("shapes are not looked at", "planning/rules.py", "if entry.shape != shape:", "if len(entry.shape) != len(shape or ()):", PLAN),
    Mutant("local shape cuts the other axis", "planning/rules.py", "extent // tp if axis == self.axis else extent",
           "extent // tp if axis != self.axis else extent", PLAN),
    # the output
    Mutant("all experts on every rank", "planning/output.py", "(local_experts, *tensor.shape)", "(local_experts * topology.ep, *tensor.shape)", PLAN),
    Mutant("experts need not divide", "planning/output.py", "if model.experts % topology.ep:", "if model.experts % topology.tp:", PLAN),
    Mutant("a layer too many", "planning/output.py", "if not 0 <= n < count]", "if not 0 <= n <= count]", PLAN),
    # shard files
    Mutant("large tensors start anywhere", "shards/format.py", "fill_to(PAGE if sizes[id(block)] >= PAGE else",
           "fill_to(1 if sizes[id(block)] >= PAGE else", SHARDS),
    Mutant("files end anywhere", "shards/format.py", "    fill_to(PAGE)\n    fused", "    fused", SHARDS),
    Mutant("fused members apart", "shards/format.py", "if fuse is not None and blocks and blocks[-1][0] == fuse:", "if False:", SHARDS),
    Mutant("small tensors first", "shards/format.py", "return (not whole, small,", "return (whole, small,", SHARDS),
    # slices of the other tensors
    Mutant("columns of another rank", "pipeline/tensor_job.py", "column = rank * width", "column = (tp - 1 - rank) * width", WHOLE),
    Mutant("rows of another rank", "pipeline/tensor_job.py", "ranks == (owner,)]", "ranks == (tp - 1 - owner,)]", WHOLE),
    Mutant("experts placed by their number in the model", "pipeline/expert_job.py",
           "first = self.first - work.plan.topology.expert_range(self.ranks[0], work.plan.experts).start", "first = self.first", WHOLE),
    Mutant("exact does not check experts", "pipeline/expert_job.py", "moves.pack(tools.check)", "moves.pack(False)", EXACT),
    Mutant("what the check finds is ignored", "pipeline/expert_job.py", "if wrong is not None:", "if False:", EXACT),
    Mutant("exact does not check other tensors", "pipeline/tensor_job.py", "if tools.check and not", "if False and not", EXACT),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Of one run: pytest's exit code, the first test that failed, and where `convert` was imported from."""

    name: str
    code: int
    killer: str
    imported: str
    output: str


class _Recorder:
    """Remembers the first test that failed in its body, where an error elsewhere proves nothing."""

    killer = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest."""
        if report.failed and report.when == "call" and not self.killer:
            self.killer = report.nodeid


def copy_package(folder: Path) -> Path:
    """The package alone, without caches."""
    shutil.copytree(
        ROOT / "convert" / "marlin_convert",
        folder / "marlin_convert",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    return folder


def occurrences(mutant: Mutant) -> int:
    """How often its text stands in the package as it is."""
    return (ROOT / "convert" / "marlin_convert" / mutant.file).read_text().count(mutant.old)


def plant(mutant: Mutant, folder: Path) -> None:
    """Change the copy."""
    path = folder / "marlin_convert" / mutant.file
    path.write_text(path.read_text().replace(mutant.old, mutant.new))


def run_all(folder: Path, workers: int) -> Iterator[Outcome]:
    """The untouched package with all tests that any mutant names, then each mutant; `workers` at a time, in no order."""
    everything = tuple(dict.fromkeys(test for mutant in MUTANTS for test in mutant.tests))
    waiting: list[tuple[str, Mutant | None, tuple[str, ...]]] = [("untouched", None, everything)]
    waiting += [(mutant.name, mutant, mutant.tests) for mutant in MUTANTS]
    running: dict[int, tuple[str, Path]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            name, mutant, tests = waiting.pop(0)
            own = copy_package(folder / str(len(waiting)))
            if mutant is not None:
                plant(mutant, own)
            sys.stdout.flush()
            process = os.fork()
            if not process:
                _child(own, tests)
            running[process] = (name, own)
        process, status = os.wait()
        name, own = running.pop(process)
        code = os.waitstatus_to_exitcode(status)
        report = own / "report.json"
        killer, imported = json.loads(report.read_text()) if report.exists() else ("", "")
        yield Outcome(name, code, killer, imported, (own / "output.txt").read_text())
        shutil.rmtree(own)


def _child(own: Path, tests: tuple[str, ...]) -> None:
    """Run tests on the copy; never returns."""
    code = 99
    try:
        output = os.open(own / "output.txt", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(own)
        os.environ["NUMBA_CACHE_DIR"] = str(own / "cache")
        sys.path.insert(0, str(own))
        recorder = _Recorder()
        options = [
            "-x",
            "-q",
            "--tb=short",
            f"--basetemp={own / 'tmp'}",
            *(f"-pno:{name}" for name in ("cacheprovider", "xdist", "warnings")),
        ]
        where = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
        code = pytest.main([*where, *options, *(str(ROOT / "tests" / test) for test in tests)], [recorder])
        sys.stdout.flush()
        (own / "report.json").write_text(
            json.dumps([recorder.killer, str(importlib.import_module("convert").__file__)])
        )
    finally:
        os._exit(int(code))


def main() -> int:
    """Print an outcome a line as JSON, and what survived to stderr."""
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        survivors = 0
        for outcome in run_all(Path(folder).resolve(), os.cpu_count() or 1):
            dead = outcome.code == 1 and outcome.killer
            survivors += not dead and outcome.name != "untouched"
            print(json.dumps(outcome.__dict__), flush=True)
            print(f"{'dead ' if dead else 'alive'} {outcome.name}: {outcome.killer}", file=sys.stderr)
    return min(survivors, 1)


if __name__ == "__main__":
    os.environ["NUMBA_DISABLE_JIT"] = "1"
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    for needed in ("numpy", "numba", "hypothesis", "safetensors", "xxhash", "tqdm"):
        importlib.import_module(needed)
    sys.exit(main())
