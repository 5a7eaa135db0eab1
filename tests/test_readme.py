"""README.md and the pages of docs/ do what they say: the commands that need neither GPU nor hub are run, in
order, on a small checkpoint in the place of K2.6, the others are parsed; numbers are held to the program,
links to files.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import click
import pytest

import marlin_convert
import trees
from checkpoints import make_small
from marlin_convert import errors
from marlin_convert.checkpoint.source import Source
from marlin_convert.cli import cli, run
from marlin_convert.cli.bench_kernel import HEADER
from marlin_convert.documents import bounds
from marlin_convert.documents.expert_map import ExpertMap
from marlin_convert.planning.output_plan import Options, OutputPlan, plan_output

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
#: what is held to the program
PAGES = [README, *DOCS]
#: all that is meant to be read
EVERY_PAGE = sorted(
    [
        *ROOT.glob("*.md"),
        *(p for f in ("docs", "schemas", "examples", "tests") for p in (ROOT / f).rglob("*.md")),
    ]
)
SHELL = {"marlin-convert", "make", "pip", "python", "cmake", "hf"}


def name_of(page: Path) -> str:
    """How a page is called in this repository."""
    return str(page.relative_to(ROOT))


def section(page: Path, title: str) -> str:
    """What stands below a heading of the second level."""
    return page.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def blocks(text: str) -> list[str]:
    """The indented blocks: commands, Python, figures. Empty lines do not end one."""
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", text + "\n", re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE).strip("\n") for block in found]


def shell_lines(text: str) -> Iterator[list[str]]:
    """The words of each command in the blocks, without comments."""
    for block in blocks(text):
        for line in block.split("\n"):
            if block.split()[0] in SHELL or line.split(" ")[0] in SHELL:
                for part in line.split(" && "):
                    if words := shlex.split(part, comments=True):
                        yield words


def python_blocks(page: Path) -> list[str]:
    """The blocks of Python."""
    return [block for block in blocks(page.read_text()) if block.startswith("from ")]


def inline(page: Path) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`\n]+)`", page.read_text())


def commands() -> list[list[str]]:
    """The marlin-convert lines of the README's section on the job."""
    return [words[1:] for words in shell_lines(section(README, "The job")) if words[0] == "marlin-convert"]


def parse(words: list[str]) -> None:
    """Read a command line as the program does, and do nothing. Raises click.UsageError."""
    command: click.Command | None = cli
    # with the settings of the program: a command keeps the names of --help that it first saw
    context = click.Context(cli, info_name="marlin-convert", **cli.context_settings)
    while isinstance(command, click.Group):
        command = command.get_command(context, words[0])
        words = words[1:]
    assert command is not None
    command.make_context(command.name, list(words), parent=context)


def every_command(group: click.Group) -> Iterator[click.Command]:
    """All commands of the program."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield command
        if isinstance(command, click.Group):
            yield from every_command(command)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the README's commands were run."""
    make_small(tmp_path / "Kimi-K2.6", layers=2, experts=4)
    monkeypatch.chdir(tmp_path)
    for line in commands():
        assert run(line) == 0, line
    return tmp_path


def test_the_job(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = ["doctor", "plan", "convert", "verify", "verify", "inspect", "reshard", "restore"]
    assert [line[0] for line in commands()] == order
    assert (job / "k26-tp8" / "rank-07-of-08" / "top.safetensors").exists()
    assert trees.tree(job / "Kimi-K2.6-again") == trees.tree(job / "Kimi-K2.6")
    # what docs/converting.md says of publishing
    (job / "k26-tp8" / "provenance.json").unlink()
    for line in commands():
        capsys.readouterr()
        assert run(line) == 0, line
        if line[0] == "verify":
            assert capsys.readouterr().out.startswith("exact: ")
    assert not (job / "k26-tp8" / "provenance.json").exists()


def test_the_python(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(marlin_convert, "load_rank", partial(marlin_convert.load_rank, device="cpu"))
    found = [(page, block) for page in PAGES for block in python_blocks(page)]
    assert len(found) == 2
    for page, block in found:
        exec(compile(block, page.name, "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_named_anywhere_exists(page: Path) -> None:
    words = re.findall(r"marlin-convert ([a-z]+)(?: ([a-z]+))?", page.read_text())
    known = set(cli.list_commands(click.Context(cli)))
    assert {verb for verb, _ in words} <= known
    benches = {name for verb, name in words if verb == "bench" and name}
    assert benches <= {"layout", "convert", "verify", "kernel", "load"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_line_is_one(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("Kimi-K2.6", "k26-tp8"):
        (tmp_path / folder).mkdir()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for first, *words in shell_lines(page.read_text()):
        match first:
            case "marlin-convert":
                parse(words)
            case "make":
                assert set(words) <= targets
            case "python":
                assert (ROOT / words[0]).is_file(), words
            case "cmake" if words[0] == "-S":
                assert (ROOT / words[1] / "CMakeLists.txt").is_file(), words
            case "hf":
                assert words[0] in {"upload", "upload-large-folder"}
            case "cmake" | "pip":  # what is built and installed; extras are looked at below
                assert words[0] in {"--build", "install"}
            case _:
                assert first == "build/shard_info"
    for text in [*inline(page), *blocks(page.read_text())]:
        assert set(re.findall(r"'\.\[([a-z-]+)\]'", text)) <= set(extras)
        if re.fullmatch(r"make [a-z-]+", text):
            assert text.split()[1] in targets
        # pages need no package; only `bench kernel` draws with one
        assert all("--plot" in line for line in text.split("\n") if ".[report]" in line)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_option_exists(page: Path) -> None:
    commands = [cli, *every_command(cli)]
    options = {name for c in commands for p in c.params for name in (*p.opts, *p.secondary_opts)}
    named = {option for text in inline(page) for option in re.findall(r"--[a-z][a-z-]*", text)}
    assert named - {"--help"} <= options


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_every_file_named_exists(page: Path) -> None:
    folders = ("tests", "examples", "docs", "schemas", "convert")
    for text in inline(page):
        if re.fullmatch(r"[\w./-]+", text) and (
            text.split("/")[0] in folders or re.search(r"/\w+\.py$", text)
        ):
            places = [ROOT / text, ROOT / "convert" / "marlin_convert" / text]
            assert any(place.exists() for place in places), text


def slugs(page: Path) -> set[str]:
    """What links to headings of a page are called."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name_of)
def test_links_lead_to_files(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        assert not heading or heading in slugs(target), link


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    text = README.read_text()
    assert len(text.split()) <= 700
    for page in [*DOCS, *(ROOT / "schemas").glob("*.md"), *ROOT.glob("*.md")]:
        assert page == README or f"]({name_of(page)})" in text


def test_the_numbers_of_full_size(full_plan: Callable[[int, int], OutputPlan], full_size: Source) -> None:
    """What is said of K2.6 is what is planned for the stand-in."""
    text, converting = README.read_text(), (ROOT / "docs" / "converting.md").read_text()
    for tp, ep, row in (
        (8, 1, "`--tp 8`"),
        (8, 8, "`--tp 8 --ep 8`"),
        (16, 1, "`--tp 16`"),
        (32, 1, "`--tp 32`"),
        (64, 1, "`--tp 64`"),
    ):
        output = full_plan(tp, ep)
        line = next(line for line in converting.splitlines() if line.startswith(f"| {row} |"))
        rank, total = f"{output.rank_bytes() / 1e9:.1f} GB", f"{output.total_bytes / 1e9:.0f} GB"
        assert line.startswith(f"| {row} | {len(output.ranks)} | {output.experts // ep} | ")
        assert line.endswith(f" | {rank} | {total} |")
        if (tp, ep) == (8, 1):
            files = f"{sum(len(unit.ranks) for unit in output.units)} shard files"
            assert f"| output | {total} in {files}, {rank} for each GPU |" in text
            w13 = next(
                tensor.spec.shape
                for tensor in output.units[1].files.tensors
                if tensor.spec.name.endswith(".w13_weight_packed")
            )
            assert f"# int32 {list(w13)}" in (ROOT / "docs" / "loading.md").read_text()
    tensors, weights = f"{len(full_size.tensors):,}", len(full_size.headers)
    assert f"| source | {full_size.payload_bytes / 1e9:.0f} GB, {tensors} tensors |" in text
    assert f"the {weights} weight files" in text
    assert f"The {weights} files of K2.6 have {full_size.payload_bytes:,} bytes" in converting
    assert f"Every one of the {tensors} is" in re.sub(r"\s+", " ", converting)


def test_the_bytes_that_engines_are_told(full_plan: Callable[[int, int], OutputPlan]) -> None:
    table = rows(section(ROOT / "schemas" / "ENGINES.md", "Bytes per GPU, K2.6"))
    plans = [full_plan(tp, ep) for tp, ep in ((8, 1), (8, 8), (16, 1), (32, 1))]
    assert {name: cells for name, *cells in table[2:]} == {
        "a rank loads": [f"{plan.rank_bytes() / 1e9:.1f} GB" for plan in plans],
        "I of a rank": [str(plan.shape.local) for plan in plans],
        "experts of a rank": [str(plan.experts // plan.topology.ep) for plan in plans],
        "a MoE layer's file": [f"{plan.units[1].file_size / 1e9:.3f} GB" for plan in plans],
    }


def keys(schema: object) -> Iterator[str]:
    """All that are defined anywhere in a schema."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        for each in schema.values():
            yield from keys(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from keys(each)


@pytest.mark.parametrize("name", ["manifest", "experts", "index"])
def test_the_format_page_says_every_key(name: str) -> None:
    """Constants of a model on the page for engines."""
    pages = "".join((ROOT / "schemas" / page).read_text() for page in ("README.md", "ENGINES.md"))
    schema = json.loads((ROOT / "schemas" / f"{name}.schema.json").read_text())
    assert {key for key in keys(schema) if not re.search(rf"\b{key}\b", pages)} == set()


def test_the_bounds_on_the_format_page() -> None:
    said = set(re.findall(r"\d[\d,]+\d", section(ROOT / "schemas" / "README.md", "Bounds")))
    names = ("CONFIG", "INDEX", "HEADER", "HEADERS", "MAX_TENSORS", "MANIFEST", "MAX_STORED", "MAX_PLACED")
    more = ("MAX_SLOTS", "EXPERT_MAP", "PROVENANCE", "LISTED", "MAX_MARKS")
    assert {f"{getattr(bounds, name):,}" for name in (*names, *more)} <= said


def test_the_hours(full_plan: Callable[[int, int], OutputPlan], full_size: Source) -> None:
    """They are sizes over rates."""

    def hours(size: float, rate: float) -> str:
        return f"{size / rate / 3600:.1f}"

    source, output, text = full_size.payload_bytes, full_plan(8, 1).total_bytes, README.read_text()
    assert f"{hours(source, 200e6)} hours where `cp` makes 200 MB/s, {hours(source, 500e6)} at 500" in text
    assert f"{hours(output, 200e6)} hours at 200 MB/s, {hours(output, 800e6)} at 800;" in text
    converting = (ROOT / "docs" / "converting.md").read_text()
    assert f"{hours(source * 8, 1e9)} hours at 1 Gbit/s" in converting
    assert f"disk | both, {(source + output) / 1e12:.2f} TB;" in text


def test_the_numbers_of_attention_apart(full_size: Source) -> None:
    text = (ROOT / "docs" / "converting.md").read_text()
    size = plan_output(full_size, Options(8, 1, attn_tp=4)).rank_bytes()
    assert f"A rank loads {size / 1e9:.1f} GB then." in text


def test_the_numbers_of_stages(full_size: Source) -> None:
    text = re.sub(r"\s+", " ", (ROOT / "docs" / "converting.md").read_text())
    plan = plan_output(full_size, Options(8, 1, pp=2))
    assert f"A rank loads at most {plan.rank_bytes() / 1e9:.1f} GB then." in text
    first, last = (stage.layers for stage in plan.stages)
    assert f"with the layers {first[0]} to {first[-1]}, embeddings" in text
    assert f"with the layers {last[0]} to {last[-1]}, norm" in text
    assert f"`VLLM_PP_LAYER_PARTITION={len(first)},{len(last)}`" in text


def test_the_numbers_of_a_placement(full_size: Source) -> None:
    text = re.sub(r"\s+", " ", (ROOT / "docs" / "converting.md").read_text())
    rows = ExpertMap((tuple(slot % 384 for slot in range(400)),) * 60)
    size = plan_output(full_size, Options(8, 8, expert_map=rows)).rank_bytes()
    assert f"With 400 slots for the 384 experts a rank loads {size / 1e9:.1f} GB." in text


def rows(text: str) -> list[list[str]]:
    """The cells of the tables."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"
    ]


def test_what_the_readme_says_was_measured() -> None:
    """It is in the tables of docs/performance.md."""
    page, text = ROOT / "docs" / "performance.md", re.sub(r"\s+", " ", README.read_text())
    loading = rows(section(page, "Loading"))
    ours, engines = (next(row for row in loading if what in row[0]) for what in ("`load_rank`", "engines do"))
    seconds = [cell.split(" s")[0] for row in (ours, engines) for cell in (row[1], row[3])]
    said = "{0} s instead of {2} s from the page cache, and in {1} s instead of {3} s from the disk"
    assert said.format(*seconds) in text
    warm, cold = (re.findall(r"\*\*([\d.]+) x\*\*", engines[column])[0] for column in (2, 4))
    assert f"ep 8 the gain is less, {warm} times and {cold} times" in text
    served = rows(section(ROOT / "docs" / "serving.md", "Seconds of loading"))
    theirs, with_ours = ([cell.split(" s")[0] for cell in row[2:]] for row in (served[2], served[3]))
    said = "SGLang itself loads them in {0} s instead of {2} s, and in {1} s instead of {3} s."
    assert said.format(*with_ours, *theirs) in text
    measured = [
        row
        for row in rows(section(page, "Converting"))
        if len(row) == 7 and row[3].startswith(tuple("123456789"))
    ]
    ratios = [re.findall(r"\d\.\d\d", row[5])[-1] for row in measured]
    converted = [row[2] for row in rows(section(page, "Restoring")) if row[0] == "`convert --verify exact`"]
    assert len(converted) == 1
    assert f"{min(ratios)} to {max(ratios + converted)} of the time of `cp`" in text
    for verb, title in (("reshard", "Resharding"), ("restore", "Restoring")):
        found = [row[2] for row in rows(section(page, title)) if row[0] == f"`{verb}`"]
        ratios = [match[0] for cell in found if (match := re.search(r"\d\.\d\d", cell))]
        assert f"`{verb}` {'-'.join(ratios)}" in text
    peaks = [float(row[6].removesuffix(" GiB")) for row in measured]
    assert f"{max(peaks[:3]):.1f} GiB at its peak on 2 cores, {max(peaks[3:]):.1f} GiB on 16" in text


def test_how_long_tests_take_is_said_once() -> None:
    """Of two places the same."""
    lanes = {row[0]: row[2] for row in rows(section(ROOT / "CONTRIBUTING.md", "Lanes"))}
    shown = dict(re.findall(r"^    make (\S+) +# .*: (about \w+)", section(README, "Try it"), re.MULTILINE))
    assert {f"`make {name}`": f"{time} minutes" for name, time in shown.items()} == {
        lane: lanes[lane] for lane in ("`make test-fast`", "`make test`")
    }


def test_the_columns_of_bench_kernel() -> None:
    """Those of the table and those it leaves out are what the program prints."""
    text = section(ROOT / "docs" / "performance.md", "The kernel")
    columns, left_out = rows(text)[0][1:], re.sub(r"\s+", " ", text).split("The program also prints ")[1]
    rest = re.findall(r"`([^`]+)`", left_out.split(". ")[0])
    assert columns == [name for name in HEADER if name in columns]
    assert sorted([*columns, *rest]) == sorted(HEADER)


def test_exit_codes() -> None:
    table = dict(rows(section(ROOT / "docs" / "converting.md", "Exit codes"))[2:])
    said = {
        errors.OutputError: "something in OUT is wrong",
        errors.UsageError: "usage",
        errors.SourceError: "the source",
        errors.MachineError: "disk, network or machine failed",
    }
    for error, words in said.items():
        assert table[str(error.exit_code)].startswith(words)
    assert table.keys() == {"0", *(str(error.exit_code) for error in said), "130, 143"}
