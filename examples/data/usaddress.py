"""Real addresses with labelled parts, as rows to measure and to train on: from the package usaddress.

    python examples/data/usaddress.py out/usaddress.jsonl
    rope-pad-fix drift smollm2 out/usaddress.jsonl --task fields --limit 24 --output out/drift

asks a model that was never trained on them, with two answers to go by. With ``--train`` the rows are for fine-tuning:
short prompts, every word of an address in one of nine parts, and 200 addresses held back in the other file.

    python examples/data/usaddress.py --train out/train.jsonl out/test.jsonl
    python train/finetune.py --train-file out/train.jsonl --eval-file out/test.jsonl --task fields \
        --output-dir out/adapter

usaddress (MIT licence, https://pypi.org/project/usaddress) brings the addresses that its own parser is trained on.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path

PACKAGE = "usaddress==0.5.16"
LABELS = {  # usaddress knows some thirty kinds of parts; these are what most addresses have
    "AddressNumber": "number",
    "StreetNamePreDirectional": "street",
    "StreetName": "street",
    "StreetNamePostType": "street",
    "StreetNamePostDirectional": "street",
    "PlaceName": "city",
    "StateName": "state",
    "ZipCode": "zip",
}
COARSE = {  # all kinds of parts; a kind that starts with none of these is "other"
    "PlaceName": "city",
    "StateName": "state",
    "Zip": "zip",
    "AddressNumber": "number",
    "Recipient": "name",
    "BuildingName": "name",
    "Street": "street",
    "Occupancy": "unit",
    "Subaddress": "unit",
    "USPS": "box",
}
HELD_BACK = 200
EXAMPLES = {
    "12 W Elm St, Dayton, OH 45402": "number: 12\nstreet: W Elm St\ncity: Dayton\nstate: OH\nzip: 45402",
    "800 Ocean Avenue Long Branch NJ": "number: 800\nstreet: Ocean Avenue\ncity: Long Branch\nstate: NJ",
}


def main() -> None:
    """Download, convert, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path, help="the JSONL file to write")
    parser.add_argument("--train", type=Path, help="write rows for fine-tuning here, and those held back to the other")
    options = parser.parse_args()
    if options.train is None:
        rows = [row for row in map(parts, addresses("labeled.xml")) if len(row[1]) > 2]
        random.Random(0).shuffle(rows)
        write(options.output, [(question(address), answer(found)) for address, found in rows])
    else:
        elements = addresses("labeled.xml", "us50_messiest_manual_label.xml")
        found = {
            " ".join(address.split()): pairs
            for address, pairs in map(coarse, elements)
            if pairs and address.count(" ") > 1
        }
        unlike = {address.lower(): (address, pairs) for address, pairs in found.items()}  # none is in both files
        rows = [(f"Address: {address}\nParts:\n", lines(pairs)) for address, pairs in unlike.values()]
        random.Random(0).shuffle(rows)
        write(options.output, rows[:HELD_BACK])
        write(options.train, rows[HELD_BACK:])


def write(path: Path, rows: Iterable[tuple[str, str]]) -> None:
    """Prompts and completions, as JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = [json.dumps({"prompt": prompt, "completion": completion}) + "\n" for prompt, completion in rows]
    path.write_text("".join(found), encoding="utf-8")
    print(f"{len(found)} addresses: {path}")


def addresses(*files: str) -> list[ElementTree.Element]:
    """The labelled addresses in these files of the package's sources."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "usaddress"]
        subprocess.run([*command, "--dest", directory, PACKAGE], check=True)
        (archive,) = Path(directory).glob("usaddress-*.tar.gz")
        with tarfile.open(archive) as opened:
            names = [name for file in files for name in opened.getnames() if name.endswith(f"/training/{file}")]
            return [one for name in names for one in ElementTree.parse(opened.extractfile(name)).getroot()]


def parts(element: ElementTree.Element) -> tuple[str, dict[str, str]]:
    """An address, and its parts by label."""
    found: dict[str, str] = {}
    for token in element:
        label = LABELS.get(token.tag)
        if label is not None:
            found[label] = f"{found.get(label, '')} {(token.text or '').strip(' ,;()')}".strip()
    return " ".join("".join(element.itertext()).split()), found


def coarse(element: ElementTree.Element) -> tuple[str, list[tuple[str, str]]]:
    """An address, and its parts in their order; neighbours of one kind are one."""
    found: list[tuple[str, str]] = []
    words = [(token.tag, " ".join((token.text or "").split())) for token in element]
    for tag, word in words:
        value = word.strip(" ,;.()")
        if tag == "Null" or not value:
            continue
        kind = next((kind for start, kind in COARSE.items() if tag.startswith(start)), "other")
        if found and found[-1][0] == kind:
            found[-1] = kind, f"{found[-1][1]} {value}"
        else:
            found.append((kind, value))
    return " ".join(word for _, word in words), found


def question(address: str) -> str:
    """What is asked, with two answers to go by."""
    shown = "\n\n".join(f"Address: {text}\n{labels}" for text, labels in EXAMPLES.items())
    return f"Parts of US addresses, one a line.\n\n{shown}\n\nAddress: {address}\n"


def answer(found: dict[str, str]) -> str:
    """Lines ``label: value``."""
    return lines(found.items())


def lines(pairs: Iterable[tuple[str, str]]) -> str:
    """The same of pairs."""
    return "\n".join(f"{label}: {value}" for label, value in pairs)


if __name__ == "__main__":
    main()
