"""`python -m launch.prepare_text`: text to the token files that language models train on."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from launch.progress import ProgressBar
from trainers.data.errors import DataError
from trainers.data.text.corpus import DEFAULT_DOCUMENT_CHARACTERS
from trainers.data.text.layout import DEFAULT_SHARES
from trainers.data.text.prepare import DEFAULT_BPE_VOCABULARY, Prepared, TextOptions, prepare_text
from trainers.data.text.tokenizer import END_OF_DOCUMENT

DESCRIPTION = """\
Tokenize text into DIR/tokens.bin and DIR/tokens.idx (Megatron's format), DIR/tokenizer.json and DIR/meta.json.
An INPUT is a text file (one document), a .jsonl file (a document a line, its "text"), either of them gzip if need be, or a
folder of such files. Without any, the sources of this Python's standard library are read. The files appear when they are
complete; killed in the middle, the same command starts again."""


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, allowed is 1 or more")
    return int(text)


def count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}, allowed is 0 or more")
    return int(text)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m launch.prepare_text",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("inputs", nargs="*", type=Path, metavar="INPUT", help="files and folders (default: Python's standard library)")
    add("--out", type=Path, required=True, metavar="DIR", help="where the files go")
    add(
        "--tokenizer",
        default="byte",
        metavar="byte|bpe|FILE",
        help="a token a byte (default), byte-level BPE trained on the training split, or a tokenizer.json",
    )
    add(
        "--vocab-size",
        type=positive,
        metavar="N",
        help=f"bpe: at most N tokens, the 256 bytes and the end of a document included (default {DEFAULT_BPE_VOCABULARY})",
    )
    add(
        "--end-of-document",
        default=END_OF_DOCUMENT,
        metavar="TOKEN",
        help=f"which token of a tokenizer.json ends documents (default {END_OF_DOCUMENT})",
    )
    add(
        "--splits",
        type=lambda text: text.split(","),
        default=list(DEFAULT_SHARES),
        metavar="TRAIN,VAL,TEST",
        help=f"shares of the documents, drawn at random (default {','.join(DEFAULT_SHARES)})",
    )
    add("--split-seed", type=count, default=0, metavar="S", help="which documents each split gets (default 0)")
    add(
        "--document-characters",
        type=positive,
        default=DEFAULT_DOCUMENT_CHARACTERS,
        metavar="N",
        help=f"cut longer documents at line ends into several (default {DEFAULT_DOCUMENT_CHARACTERS})",
    )
    add("--pattern", default="*", metavar="GLOB", help="names of the files read in folders (default *)")
    add("--overwrite", action="store_true", help="replace what DIR holds")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    try:
        options = TextOptions(
            tokenizer=args.tokenizer,
            vocabulary=args.vocab_size,
            end_of_document=args.end_of_document,
            shares=args.splits,
            split_seed=args.split_seed,
            document_characters=args.document_characters,
            pattern=args.pattern,
        )
        with ProgressBar() as bar:
            prepared = prepare_text(args.inputs or None, args.out, options, overwrite=args.overwrite, progress=bar)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind, the same command starts again", file=sys.stderr)
        return 130
    print(summary(args.out, prepared))
    return 0


def summary(directory: Path, prepared: Prepared) -> str:
    meta = prepared.meta
    splits = ", ".join(f"{split} {len(documents)}" for split, documents in meta.splits().items())
    speed = f", {meta.tokens / prepared.encode_s:.0f} tokens/s" if prepared.encode_s else ", there already"
    lines = [
        f"{directory}: {meta.documents} documents ({splits}), {meta.tokens} tokens{speed}",
        f"vocabulary {meta.vocabulary}, end of document {meta.end_of_document}; text sha256 {meta.text_sha256}",
    ]
    if meta.skipped["count"]:
        examples = meta.skipped["examples"]
        more = ", ..." if meta.skipped["count"] > len(examples) else ""
        lines.append(f"{meta.skipped['count']} files left out, which are not UTF-8 text: {', '.join(examples)}{more}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
