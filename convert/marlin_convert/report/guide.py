"""What faults look like, and what to do."""

from __future__ import annotations

from marlin_convert.report.html import Html, section, table

#: what a fault looks like, what it may be, what to do
GUIDE = (
    (
        "one file wrong, the rest of its layer not read",
        "it is missing, cut off or was exchanged",
        "remove it and run the same convert command again; it remakes what is missing",
    ),
    (
        "one expert, one rank: bytes do not match their digest",
        "the disk or a copy changed them",
        "the same; where it comes again, distrust the disk and the memory",
    ),
    (
        "'it holds the data of expert N', 'gate and up are exchanged', another rank's slice",
        "something was written to the wrong place, or edited",
        "the same; if a fresh conversion shows it again, report it: it is a fault of the program",
    ),
    (
        "a whole rank or a whole layer wrong",
        "folders or files were exchanged or mixed from two conversions",
        "put them back, or remove them and run convert again",
    ),
    (
        "manifest.json, digests.bin or source/ wrong",
        "what the folder keeps to prove itself is damaged",
        "run the same convert command again with --overwrite",
    ),
    (
        "the source may be damaged",
        "the output is what it was made to be, and the published file is not",
        "fetch the named source file again before anything is removed",
    ),
    (
        "verify exact, the kernel reads weights differently",
        "the kernel of this build reads another layout",
        "compare with doctor --kernel and another --provider before you blame the files",
    ),
)


def guide() -> Html:
    """What faults look like."""
    header = ("what you see", "what it may be", "what to do")
    return section("What a fault looks like", table("Faults and what to do", header, GUIDE, "prose"))
