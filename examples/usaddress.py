"""Real addresses with labelled parts, as rows for `rope-pad-fix drift --task fields`: from the package usaddress.

    python examples/usaddress.py out/usaddress.jsonl
    rope-pad-fix drift smollm2 out/usaddress.jsonl --task fields --limit 24 --output out/drift

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
EXAMPLES = {
    "12 W Elm St, Dayton, OH 45402": "number: 12\nstreet: W Elm St\ncity: Dayton\nstate: OH\nzip: 45402",
    "800 Ocean Avenue Long Branch NJ": "number: 800\nstreet: Ocean Avenue\ncity: Long Branch\nstate: NJ",
}


def main() -> None:
    """Download, convert, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path, help="the JSONL file to write")
    output = parser.parse_args().output
    rows = [row for row in map(parts, addresses()) if len(row[1]) > 2]
    random.Random(0).shuffle(rows)
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", encoding="utf-8") as file:
        for address, found in rows:
            file.write(json.dumps({"prompt": question(address), "completion": answer(found)}) + "\n")
    print(f"{len(rows)} addresses: {output}")


def addresses() -> list[ElementTree.Element]:
    """The labelled addresses of the package's sources."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "usaddress"]
        subprocess.run([*command, "--dest", directory, PACKAGE], check=True)
        (archive,) = Path(directory).glob("usaddress-*.tar.gz")
        with tarfile.open(archive) as opened:
            name = next(name for name in opened.getnames() if name.endswith("training/labeled.xml"))
            file = opened.extractfile(name)
            assert file is not None
            return list(ElementTree.parse(file).getroot())


def parts(element: ElementTree.Element) -> tuple[str, dict[str, str]]:
    """An address, and its parts by label."""
    found: dict[str, str] = {}
    for token in element:
        label = LABELS.get(token.tag)
        if label is not None:
            found[label] = f"{found.get(label, '')} {(token.text or '').strip(' ,;()')}".strip()
    return " ".join("".join(element.itertext()).split()), found


def question(address: str) -> str:
    """What is asked, with two answers to go by."""
    shown = "\n\n".join(f"Address: {text}\n{labels}" for text, labels in EXAMPLES.items())
    return f"Parts of US addresses, one a line.\n\n{shown}\n\nAddress: {address}\n"


def answer(found: dict[str, str]) -> str:
    """Lines ``label: value``."""
    return "\n".join(f"{label}: {value}" for label, value in found.items())


if __name__ == "__main__":
    main()
