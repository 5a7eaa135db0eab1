"""How much a file that is read whole may hold: each bound is far over the largest that a checkpoint of this
family needs (K2.6: 61 layers, 208,550 tensors; K3: 93 and 497,220), and low enough that reading the
file takes less than 1 GB, whatever is in it.
"""

from __future__ import annotations

from typing import Final

#: commas, colons and opening brackets of a JSON text, those in strings too: a text has at most one more
#: values and keys. The smallest take most memory, `[],` 30 times its length. The manifest of K2.6 at tp 64
#: has 1.4 million, the headers of all its files together 2.4, the index of K3 1.0
MAX_MARKS: Final = 4 << 20

# bytes:
#: config.json of the source: 3 to 100 KB; that of OUT, which has indents of its own, is a listed file
CONFIG: Final = 4 << 20
#: an index: 24 MB for K2.6, 60 for K3
INDEX: Final = 100_000_000
#: the header of one weight file, here the limit of the reference reader: 0.5 MB for K2.6, 0.8 for K3
HEADER: Final = 100_000_000
#: the headers of all weight files together: 30 MB for K2.6, 75 for K3; and the tensors in them
HEADERS: Final = 128 << 20
MAX_TENSORS: Final = 1 << 20
#: a manifest: for K2.6 8.8 MB at tp 32, 17 at tp 64
MANIFEST: Final = 64 << 20
#: tensors of all shards together, of which a manifest has 220 to 250 bytes and 18 to 20 marks each, 300 with
#: the longest names; planning refuses more: 78,344 for K2.6 at tp 64
MAX_STORED: Final = 160_000
#: experts of one rank in all layers, of which its experts.json has 110 bytes and 17 marks each; planning
#: refuses more: 23,040 for K2.6 without ep, 55,000 for K3
MAX_PLACED: Final = 200_000
#: slots of routed experts in all layers where a map places them, each a number and a mark of the manifest:
#: 24,000 for K2.6 with 16 redundant experts; planning refuses more
MAX_SLOTS: Final = 1 << 18
#: the file of an expert map: 100 KB for K2.6
EXPERT_MAP: Final = 16 << 20
#: the record of a unit: for K2.6 at tp 64 2.6 MB, most of it the digests of experts, of which planning
#: refuses more than half of this
RECORD: Final = 64 << 20
#: job.json and what `download` leaves have some hundred bytes a file of the source
JOB: Final = 16 << 20
#: provenance.json: a command line and some times
PROVENANCE: Final = 1 << 20
#: a file that is copied as it stands (tokenizer, README): 20 MB the largest; and all of them, held together
COPIED: Final = 64 << 20
ALL_COPIED: Final = 256 << 20
#: any file that a manifest lists; the largest is digests.bin: 94 MB for K2.6 at tp 64, 169 for K3 at tp 32
LISTED: Final = 256 << 20


def bound_of(name: str) -> int:
    """Of a file beside the weights of a checkpoint, by its name."""
    return {"config.json": CONFIG, "model.safetensors.index.json": INDEX}.get(name, COPIED)
