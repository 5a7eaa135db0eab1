"""The command line: what it loads, what it prints and where, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import numpy as np
import pytest

import trees
from checkpoints import Checkpoint
from forks import Forks
from marlin_convert import cli

Command = Callable[..., tuple[int, str, str]]
HEAVY = (
    "torch",
    "numba",
    "huggingface_hub",
    "transformers",
    "safetensors",
    "sgl_kernel",
    "sglang",
    "matplotlib",
)
PROBE = f"""
import sys
from marlin_convert.cli import run
code = run(sys.argv[1:])
print([name for name in {HEAVY!r} if name in sys.modules], code, file=sys.stderr)
"""
PACKED = "language_model.model.layers.1.mlp.experts.w13_weight_packed"


def loaded(*arguments: object) -> str:
    """The last line that PROBE says: heavy modules, exit code."""
    command = [sys.executable, "-c", PROBE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()[-1]


@pytest.mark.parametrize("verb", ["", *cli.VERBS])
def test_help_loads_nothing_heavy(verb: str) -> None:
    assert loaded(*([verb] if verb else []), "--help") == "[] 0"


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_plan_loads_nothing_heavy(tiny: Checkpoint, tmp_path: Path, options: tuple[str, ...]) -> None:
    assert loaded("plan", tiny.folder, tmp_path / "out", "--tp", 2, *options) == "[] 0"


def test_inspect_loads_nothing_heavy(tiny_tp2: Path) -> None:
    assert loaded("inspect", tiny_tp2, "--tensor", PACKED) == "[] 0"


def test_importing_loads_nothing_at_all() -> None:
    code = (
        "import sys; before = set(sys.modules); import marlin_convert; print(sorted(m for m in"
        " set(sys.modules) - before if m.startswith('marlin_convert')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['marlin_convert']\n"


def test_converting_loads_no_torch(tiny: Checkpoint, tmp_path: Path) -> None:
    said = loaded("convert", tiny.folder, tmp_path / "out", "--tp", 2)
    assert said.endswith(" 0")
    assert "torch" not in said


@pytest.mark.parametrize("verb", ["plan", "convert", "verify", "inspect"])
def test_help_says_what_a_verb_does(command: Command, verb: str) -> None:
    code, stdout, stderr = command(verb, "--help")
    assert (code, stderr) == (0, "")
    assert stdout.startswith(f"Usage: marlin-convert {verb} [OPTIONS]")
    assert "--json" in stdout


def test_group_help_names_verbs_and_exit_codes(command: Command) -> None:
    _, stdout, _ = command("--help")
    for verb in cli.VERBS:
        assert f"\n  {verb} " in stdout
    words = " ".join(stdout.split())
    assert (
        "Exit codes: 0 done; 1 something in OUT is wrong; 2 usage or conflicting options; 3 the source is not"
        " what it should be; 4 disk," in words
    )
    assert "130 and 143 interrupted" in words


def every_command(
    group: click.Group, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All commands with the words that call them."""
    for name in group.list_commands(click.Context(group)):
        found = group.get_command(click.Context(group), name)
        assert found is not None
        yield (*words, name), found
        if isinstance(found, click.Group):
            yield from every_command(found, (*words, name))


def test_every_help_has_examples_that_are_command_lines(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    for folder in ("out-tp8", "checkpoint", "out-tp8/rank-03-of-08"):
        (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / "out-tp8/rank-03-of-08/layer-001.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    for words, found in every_command(cli.cli):
        said = command(*words, "-h")[1]
        lines = re.findall(r"^    marlin-convert (.*)$", said.split("Examples:\n")[1], re.MULTILINE)
        assert lines, words
        for line in lines:
            given = shlex.split(line.replace("/data", "data"))
            assert tuple(given[: len(words)]) == words or isinstance(found, click.Group)
            if not isinstance(found, click.Group):
                found.make_context(found.name, given[len(words) :])


def test_every_option_says_what_it_is_for() -> None:
    for words, found in every_command(cli.cli):
        for option in found.params:
            assert not isinstance(option, click.Option) or option.help, (words, option.name)


def test_every_summary_is_a_sentence(command: Command) -> None:
    for group in ((), ("bench",)):
        for line in command(*group, "--help")[1].split("Commands:\n")[1].split("\n\n")[0].splitlines():
            assert line.endswith("."), line
            assert not line.endswith("..."), line


def test_a_convert_py_of_the_users_is_not_in_the_way(tiny: Checkpoint, tmp_path: Path) -> None:
    """In the working folder, and first on the path."""
    (tmp_path / "convert.py").write_text("raise SystemExit('mine')")
    line = [sys.executable, "-m", "marlin_convert", "plan", str(tiny.folder), "--tp", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((".", os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "meant"), [(("conver",), "convert"), (("verfy", "x"), "verify"), (("bench", "lod"), "load")]
)
def test_a_mistyped_verb(command: Command, words: tuple[str, ...], meant: str) -> None:
    code, _, stderr = command(*words)
    assert code == 2
    assert f"did you mean {meant}?" in stderr
    assert "did you mean" not in command("nonsense")[2]


def test_version(command: Command) -> None:
    assert command("--version")[:2] == (0, "marlin-convert, version 0.2.0.dev0\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("plan",),
        ("convert", "only-one"),
        ("verify",),
        ("plan", "x", "--tp", "two"),
        ("--nonsense",),
    ],
)
def test_usage_errors(command: Command, arguments: tuple[str, ...]) -> None:
    code, stdout, stderr = command(*arguments)
    assert (code, stdout) == (2, "")
    assert "Usage: marlin-convert" in stderr


# A whole job, as a person would see it.


def test_job(tiny: Checkpoint, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "out"
    code, stdout, stderr = command("plan", tiny.folder, out, "--tp", 2)
    assert (code, stderr) == (0, "")
    assert (
        f"source: {len(tiny.tensors):,} tensors, {tiny.nbytes:,} bytes in {len(tiny.files)} files" in stdout
    )
    assert "layer-001 .. layer-002 (2 units): 2 files of" in stdout
    assert not out.exists()
    code, stdout, stderr = command("convert", tiny.folder, out, "--tp", 2)
    assert (code, stderr) == (0, "")
    assert stdout.startswith(f"{out}: 5 units made, ")
    assert stdout.endswith(f"marlin-convert verify {out}\n")
    assert command("convert", tiny.folder, out, "--tp", 2)[1].startswith(
        f"{out} is finished already: 5 units"
    )
    (out / "LICENSE").unlink()
    assert command("convert", tiny.folder, out, "--tp", 2)[1].startswith(
        f"{out} is finished: its documents were written; 5 units"
    )
    for source, against in ((), "the source's digests"), (("--source", tiny.folder), "the source itself"):
        code, stdout, stderr = command("verify", out, *source)
        assert (code, stderr) == (0, "")
        assert stdout.startswith("exact: ")
        assert f"{len(tiny.tensors):,} source tensors compared with {against}" in stdout


def test_plan_is_what_is_written(tiny: Checkpoint, tiny_tp2: Path, command: Command) -> None:
    plan = json.loads(command("plan", tiny.folder, tiny_tp2, "--tp", 2, "--json")[1])
    written = {shard["path"]: shard for shard in trees.manifest_of(tiny_tp2)["shards"]}
    planned = {path: unit for unit in plan["units"] for path in unit["paths"]}
    assert planned.keys() == written.keys()
    for path, unit in planned.items():
        assert unit["file_size"] == written[path]["size"] == (tiny_tp2 / path).stat().st_size
        assert [{k: t[k] for k in ("name", "dtype", "shape", "offset", "size")} for t in unit["tensors"]] == [
            {k: t[k] for k in ("name", "dtype", "shape", "offset", "size")} for t in written[path]["tensors"]
        ]
        assert [view["name"] for view in unit["fused"]] == [view["name"] for view in written[path]["fused"]]
    assert plan["bytes"]["output"] == sum(shard["size"] for shard in written.values())
    rank = sum(
        t["size"]
        for shard in written.values()
        if shard["rank"] == 0
        for t in shard["tensors"]
        if not t["name"].startswith("__pad__.")
    )
    index = json.loads((tiny_tp2 / "rank-00-of-02" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == rank
    assert plan["bytes"]["rank"] >= rank
    assert plan["convert"]["free"] > 0
    assert (plan["source"]["tensors"], plan["source"]["payload_bytes"]) == (len(tiny.tensors), tiny.nbytes)
    assert plan["left_out"] == []
    assert plan["copied"] == sorted(
        path.name
        for path in tiny.folder.iterdir()
        if path.name not in ("README.md", "config.json", "model.safetensors.index.json")
        and path.suffix != ".safetensors"
    )


def test_rank_bytes_are_those_of_the_index(tiny: Checkpoint, tiny_tp2: Path, command: Command) -> None:
    """What one rank loads, fillers not counted."""
    plan = json.loads(command("plan", tiny.folder, "--tp", 2, "--json")[1])
    index = json.loads((tiny_tp2 / "rank-00-of-02" / "model.safetensors.index.json").read_text())
    assert plan["bytes"]["rank"] == index["metadata"]["total_size"]


def test_plan_names_what_is_left_out(copied_source: Path, command: Command) -> None:
    (copied_source / "optimizer.pt").write_bytes(b"x")
    (copied_source / "figures").mkdir()
    (copied_source / ".gitattributes").write_text("")
    code, stdout, _ = command("plan", copied_source, "--tp", 2, "--json")
    assert code == 0
    assert json.loads(stdout)["left_out"] == [".gitattributes", "figures/", "optimizer.pt"]


def test_inspect_folder(tiny: Checkpoint, tiny_tp2: Path, command: Command) -> None:
    code, stdout, stderr = command("inspect", tiny_tp2, "--json")
    assert (code, stderr) == (0, "")
    found = json.loads(stdout)
    assert (found["layout"], found["group_size"], found["tp"], found["ep"]) == (
        "moe_wna16_marlin.u4b8",
        32,
        2,
        1,
    )
    assert (found["ranks"], found["layers"], found["complete"]) == ([0, 1], [0, 1, 2], True)
    assert found["checks"] == "exact"
    manifest = trees.manifest_of(tiny_tp2)["source"]
    assert found["source"] == {key: manifest[key] for key in ("id", "tensors", "payload_bytes")}
    assert found["bytes"] == sum(path.stat().st_size for path in tiny_tp2.rglob("*.safetensors"))
    assert [unit["unit"] for unit in found["units"]] == [
        "layer-000",
        "layer-001",
        "layer-002",
        "top",
        "common",
    ]
    assert [unit["files"] for unit in found["units"]] == [2, 2, 2, 2, 1]
    assert "layer-001" in command("inspect", tiny_tp2)[1]


def test_inspect_file(tiny_tp2: Path, command: Command) -> None:
    path = tiny_tp2 / "rank-01-of-02" / "layer-001.safetensors"
    raw = trees.read_shard(path)
    found = json.loads(command("inspect", path, "--json")[1])
    assert found["metadata"] == raw.metadata
    assert found["bytes"] == len(raw.data)
    assert [tensor["offset"] for tensor in found["tensors"]] == [entry[3] for entry in raw.entries]
    assert [tensor["shape"] for tensor in found["tensors"]] == [list(entry[2]) for entry in raw.entries]


def test_inspect_packed_tensor(tiny: Checkpoint, tiny_tp2: Path, command: Command) -> None:
    found = json.loads(command("inspect", tiny_tp2, "--tensor", PACKED, "--rank", 1, "--json")[1])
    assert (found["dtype"], found["shape"]) == ("I32", [4, 16, 512])
    expected = np.zeros(16, int)
    for expert in trees.slices_of(tiny, 1, 1, 2, 1):
        expected += np.bincount(expert.w13_codes.reshape(-1), minlength=16)
    assert [row["count"] for row in found["codes"]] == expected.tolist()
    assert [(row["code"], row["value"]) for row in found["codes"]] == [(code, code - 8) for code in range(16)]
    assert [row["share"] for row in found["codes"]] == (expected / expected.sum()).tolist()
    said = command("inspect", tiny_tp2, "--tensor", PACKED, "--rank", 1)[1]
    assert "shape: 4x16x512\n" in said
    assert f"{expected[3] / expected.sum():.4%}" in said


def test_inspect_scales_and_views(tiny: Checkpoint, tiny_tp2: Path, command: Command) -> None:
    found = json.loads(
        command("inspect", tiny_tp2, "--tensor", PACKED.replace("packed", "scale"), "--json")[1]
    )
    bits = np.concatenate([expert.w13_scales.reshape(-1) for expert in trees.slices_of(tiny, 1, 0, 2, 1)])
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    assert (found["minimum"], found["maximum"], found["zeros"], found["not_finite"]) == (
        values.min(),
        values.max(),
        0,
        0,
    )
    view = json.loads(
        command(
            "inspect", tiny_tp2, "--tensor", "language_model.model.layers.0.mlp.gate_up_proj.weight", "--json"
        )[1]
    )
    assert view["shape"] == [512, 256]
    common = json.loads(command("inspect", tiny_tp2, "--tensor", "mm_projector.proj.0.bias", "--json")[1])
    assert common["shape"] == [128]


@pytest.mark.parametrize("folder", [False, True])
def test_inspecting_a_file_that_is_cut_off_meanwhile(
    forks: Forks, copied: Path, tmp_path: Path, folder: bool
) -> None:
    """It is read and not mapped: touching what is gone of a mapping ends the process."""
    path = copied / "rank-00-of-02" / "layer-001.safetensors"
    fault = {
        "call": "preadv",
        "number": 0,
        "action": "run",
        "command": ["truncate", "--size", "8192", str(path)],
        "result": str(tmp_path / "result"),
    }
    done = forks.run("inspect", copied if folder else path, "--tensor", PACKED, fault=fault)
    assert path.stat().st_size == 8192
    assert (done.code, done.stdout) == (1 if folder else 3, "")
    assert f"{path} ends at byte 8192, before its tensors do: it was changed while being read" in done.stderr


@pytest.mark.parametrize("verb", ["inspect"])
def test_inspect_of_what_is_not_there(tiny_tp2: Path, command: Command, verb: str) -> None:
    code, _, stderr = command(verb, tiny_tp2, "--tensor", "no.such.tensor")
    assert code == 2
    assert "has no tensor no.such.tensor on rank 0 or in common/; there is, for example, language" in stderr
    near = command(verb, tiny_tp2, "--tensor", PACKED.replace("w13", "w31"))[2]
    assert PACKED in near.split("for example, ")[1]
    shard = tiny_tp2 / "rank-00-of-02" / "layer-001.safetensors"
    assert PACKED in command(verb, shard, "--tensor", "w13_weight_packed")[2]
    assert command(verb, tiny_tp2, "--tensor", PACKED, "--rank", 2)[0] == 2
    assert command(verb, tiny_tp2 / "nothing")[0] == 2


# Where it is printed.


def test_progress_goes_to_a_terminal_on_stderr_alone(tiny: Checkpoint, tmp_path: Path) -> None:
    parent, child = os.openpty()
    termios.tcsetwinsize(child, (24, 100))
    command = [
        sys.executable,
        "-m",
        "marlin_convert",
        "convert",
        str(tiny.folder),
        str(tmp_path / "out"),
        "--tp",
        "2",
        "--json",
    ]
    done = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=child)
    os.close(child)
    shown = b""
    try:
        while piece := os.read(parent, 4096):
            shown += piece
    except OSError:  # the other end is closed
        pass
    os.close(parent)
    assert done.stdout is not None
    stdout = done.stdout.read()
    assert done.wait() == 0
    assert b"converting" in shown
    assert json.loads(stdout)["units_made"] == 5


def test_output_that_nobody_reads(tiny_tp2: Path) -> None:
    """`| head` closes the pipe."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "marlin_convert", "inspect", str(tiny_tp2), "--json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_traceback_only_where_asked_for(
    tiny: Checkpoint, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("convert", tmp_path / "a" / "b" / "c", tmp_path / "out", "--tp", 2)
    assert len(command(*arguments)[2].strip().splitlines()) == 1
    monkeypatch.setenv("MARLIN_CONVERT_DEBUG", "1")
    assert "Traceback" in command(*arguments)[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "{source}", "{out}", "--tp", "2", "--layers", "0-99999999999"),
        ("verify", "{out}", "--kernel", "--experts", "0-9999999"),
    ],
)
def test_numbers_beyond_all_sense(
    tiny: Checkpoint, tiny_tp2: Path, command: Command, arguments: tuple[str, ...]
) -> None:
    code, _, said = command(*(argument.format(source=tiny.folder, out=tiny_tp2) for argument in arguments))
    assert code == 2
    assert "is more than there can be" in said


def test_a_report_that_cannot_be_written_is_found_before_the_work(
    tiny_tp2: Path, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    code, out, said = command("verify", tiny_tp2, "--report", tmp_path / "file")
    assert (code, out) == (2, "")
    assert f"Directory '{tmp_path / 'file'}' is a file" in said


def test_nowhere_to_write_the_output_to(tiny: Checkpoint, tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        line = [
            sys.executable,
            "-m",
            "marlin_convert",
            "plan",
            str(tiny.folder),
            str(tmp_path / "out"),
            "--tp",
            "2",
        ]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 4
    assert "No space left on device" in done.stderr
    assert "internal error" not in done.stderr


def test_a_file_of_the_users_is_to_be_moved_not_removed(
    tiny_tp2: Path, command: Command, tmp_path: Path
) -> None:
    out = shutil.copytree(tiny_tp2, tmp_path / "out")
    (out / "notes.txt").write_text("mine")
    code, _, stderr = command("verify", out)
    assert code == 1
    assert stderr.endswith("to mend it: move away what is not in the manifest\n")
    (out / "rank-00-of-02" / "layer-001.safetensors").unlink()
    assert "remove the other files named above" in command("verify", out)[2]


def test_an_edited_document_is_to_be_moved_not_removed(
    tiny: Checkpoint, copied: Path, command: Command, tmp_path: Path
) -> None:
    """As `convert` has it, which names it and writes it again once it is gone."""
    card, again = copied / "README.md", "run the same convert command again; it remakes what is missing\n"
    card.write_text("mine")
    code, _, stderr = command("verify", copied)
    assert (code, stderr) == (1, f"to mend it: move away the documents that were changed and {again}")
    lost = copied / "rank-00-of-02" / "layer-001.safetensors"
    lost.write_bytes(bytes(lost.stat().st_size))
    said = command("verify", copied)[2]
    move = "move away the documents that were changed, remove the other files named above"
    assert said == f"to mend it: {move} and {again}"
    card.rename(tmp_path / "mine")
    lost.unlink()
    assert command("convert", tiny.folder, copied, "--tp", 2)[0] == 0
    assert command("verify", copied)[0] == 0


@pytest.mark.parametrize(
    ("spoil", "advice"),
    [
        (
            "rank-00-of-02/layer-001.safetensors",
            "remove the files named above and run the same convert command again",
        ),
        ("digests.bin", "run the same convert command again with --overwrite"),
    ],
)
def test_verify_says_how_to_mend_it(
    tiny_tp2: Path, command: Command, tmp_path: Path, spoil: str, advice: str
) -> None:
    out = shutil.copytree(tiny_tp2, tmp_path / "out")
    data = bytearray((out / spoil).read_bytes())
    data[-5000 if len(data) > 5000 else 0] ^= 1
    (out / spoil).write_bytes(data)
    code, _, said = command("verify", out)
    assert code == 1
    assert advice in said


@pytest.mark.parametrize("left", [None, 0.5])
def test_a_shard_that_is_gone_or_cut_off_is_to_be_made_again(
    tiny_tp2: Path, command: Command, tmp_path: Path, left: float | None
) -> None:
    out = shutil.copytree(tiny_tp2, tmp_path / "out")
    shard = out / "rank-00-of-02" / "layer-001.safetensors"
    if left is None:
        shard.unlink()
    else:
        os.truncate(shard, int(shard.stat().st_size * left))
    code, _, said = command("verify", out)
    assert code == 1
    assert "run the same convert command again; it remakes what is missing" in said


def test_what_the_hubs_tools_leave_is_no_damage(tiny_tp2: Path, command: Command, tmp_path: Path) -> None:
    out = shutil.copytree(tiny_tp2, tmp_path / "out")
    (out / ".cache" / "huggingface" / "upload").mkdir(parents=True)
    (out / ".cache" / "huggingface" / "upload" / "x.metadata").write_text("1")
    (out / ".gitattributes").write_text("*.safetensors filter=lfs")
    assert command("verify", out)[0] == 0
    (out / ".cache" / "other").write_text("1")
    assert command("verify", out)[0] == 1


def test_inspect_says_what_is_not_there(copied: Path, command: Command) -> None:
    assert json.loads(command("inspect", copied, "--json")[1])["missing"] == []
    lost = copied / "rank-01-of-02" / "layer-001.safetensors"
    lost.write_bytes(lost.read_bytes()[:-4096])
    code, stdout, stderr = command("inspect", copied)
    assert code == 0
    assert "complete: False" in stdout
    assert stderr == ""
    assert (
        "missing: rank-01-of-02/layer-001.safetensors (gone or of another size); marlin-convert verify"
        f" {copied} says more\n"
    ) in stdout
    assert "checks: exact while converting\n" in stdout
    found = json.loads(command("inspect", copied, "--json")[1])
    assert (found["complete"], found["missing"]) == (False, ["rank-01-of-02/layer-001.safetensors"])


def test_where_some_ranks_are_elsewhere_the_option_is_named(copied: Path, command: Command) -> None:
    """A node that loads one rank has the files of that."""
    shutil.rmtree(copied / "rank-01-of-02")
    code, _, stderr = command("verify", copied)
    assert code == 1
    assert stderr.startswith("to mend it: rank-01-of-02: not here; where that is meant, verify what is here")
    assert command("verify", copied, "--ranks", 0)[0] == 0


def test_a_rank_that_has_lost_its_index_alone_is_here(copied: Path, command: Command) -> None:
    (copied / "rank-01-of-02" / "model.safetensors.index.json").unlink()
    code, _, stderr = command("verify", copied)
    assert code == 1
    assert stderr.startswith("to mend it: remove the files named above")


@pytest.mark.parametrize(
    ("line", "ends"),
    [
        (("convert", "source", "out", "--tp", "8"), "; run the same command again to continue"),
        (("download", "org/name"), "; run the same command again to continue"),
        (("convert", "source", "out", "--tp", "8", "--dry-run"), ""),
        (("plan", "source", "--tp", "8"), ""),
        (("verify", "out"), ""),
        ((), ""),
    ],
)
def test_an_interrupt_promises_to_continue_what_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: tuple[str, ...], ends: str
) -> None:
    def interrupted(arguments: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_call", interrupted)
    assert cli.run(list(line)) == 130
    assert capsys.readouterr().err == f"interrupted{ends}\n"


@pytest.mark.parametrize("verb", ["verify", "inspect"])
def test_where_the_report_is_is_said(tiny_tp2: Path, tmp_path: Path, command: Command, verb: str) -> None:
    _, _, stderr = command(verb, tiny_tp2, "--report", tmp_path / "report")
    assert stderr == f"report: {tmp_path}/report/{verb}.html\n"
    assert (tmp_path / "report" / f"{verb}.html").exists()
