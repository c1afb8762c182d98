"""The command ``rope-pad-fix``: its subcommands, their options, and what it says where its libraries are missing.

The library itself needs none of the extra's packages, so they are imported only once `main` has seen that they are
there. For the same reason the subcommands are defined inside `build`.
"""

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    import typer

ROPE_SCALES = ("base", "positions")
EXTRA = ("gguf", "jinja2", "matplotlib", "numpy", "psutil", "rich", "scipy", "sklearn", "typer")


def main() -> None:
    """Run the command line, and exit."""
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        print(f'rope-pad-fix needs {", ".join(missing)}: pip install "rope-pad-fix[drift]"', file=sys.stderr)
        raise SystemExit(2)
    build()()


def build() -> "typer.Typer":
    """The typer application."""
    import typer

    from .demo import DTYPES, NEW_TOKENS, run
    from .drift import command
    from .drift.batching import ORDERS
    from .drift.metrics import TASKS
    from .loading import DTYPES as DTYPES_OF_DRIFT
    from .patching import DEFAULT_LEVEL, LEVELS

    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

    @app.callback()
    def about() -> None:
        """Batched inference that gives what single inference gives."""

    @app.command()
    def demo(
        dtype: Annotated[
            list[str] | None,
            typer.Option(
                metavar="NAME", help=f"{' or '.join(DTYPES)}; may be given more than once.", show_default="all"
            ),
        ] = None,
        threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="torch's choice")] = None,
        new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")] = NEW_TOKENS,
        level: Annotated[
            str, typer.Option(metavar="NAME", help=f"What to apply: {' or '.join(LEVELS)}.")
        ] = DEFAULT_LEVEL,
    ) -> None:
        """Let SmolLM2-135M answer 8 prompts alone and in a padded batch, stock and patched, and compare.

        The model is downloaded (93 MB) and converted at the first use.

        The exit status is 1 if a patched batch does not give what the prompts give alone.
        """
        dtypes = list(dict.fromkeys(dtype or DTYPES))
        for name in dtypes:
            _check("--dtype", name, DTYPES)
        _check("--level", level, LEVELS)
        raise typer.Exit(run(dtypes, level, new_tokens, threads))

    @app.command()
    def drift(
        model: Annotated[
            str | None,
            typer.Argument(metavar="MODEL", help='A path, a Hub id, a .gguf file, or "smollm2".', show_default=False),
        ] = None,
        data: Annotated[
            str | None,
            typer.Argument(
                metavar="DATA",
                help="JSONL, JSON, CSV or Parquet, a `datasets` directory, or a Hub id.",
                show_default=False,
            ),
        ] = None,
        task: Annotated[
            str, typer.Option(metavar="NAME", help=f"How answers are scored: {' or '.join(TASKS)}.")
        ] = "text",
        prompt: Annotated[str, typer.Option(metavar="COLUMN", help="Column of the prompts.")] = "prompt",
        reference: Annotated[str, typer.Option(metavar="COLUMN", help="Column of the right answers.")] = "completion",
        choices: Annotated[
            str | None,
            typer.Option(metavar="COLUMN", help="Column of the choices, for task choices.", show_default=False),
        ] = None,
        messages: Annotated[
            str, typer.Option(metavar="COLUMN", help="Column of chats, if there is no prompt.")
        ] = "messages",
        split: Annotated[str, typer.Option(metavar="NAME", help="Of a data set with several splits.")] = "test",
        limit: Annotated[
            int | None, typer.Option(min=1, help="Only the first so many rows.", show_default="all")
        ] = None,
        padding: Annotated[
            list[str] | None, typer.Option(metavar="SIDE", help="left or right; may be repeated.", show_default="both")
        ] = None,
        batch_size: Annotated[
            list[int] | None, typer.Option(min=1, help="Rows of a batch; may be repeated.", show_default="8")
        ] = None,
        dtype: Annotated[
            list[str] | None,
            typer.Option(
                metavar="NAME", help=f"{' or '.join(DTYPES_OF_DRIFT)}; may be repeated.", show_default="the model's"
            ),
        ] = None,
        attention: Annotated[
            list[str] | None,
            typer.Option(metavar="NAME", help="sdpa, eager …; may be repeated.", show_default="the model's"),
        ] = None,
        level: Annotated[
            list[str] | None,
            typer.Option(
                metavar="NAME",
                help=f"stock or {' or '.join(LEVELS)}; may be repeated.",
                show_default="stock, batch_invariant",
            ),
        ] = None,
        path: Annotated[
            list[str] | None, typer.Option(metavar="NAME", help="ids or embeds; may be repeated.", show_default="ids")
        ] = None,
        order: Annotated[str, typer.Option(metavar="NAME", help=f"Rows in batches: {' or '.join(ORDERS)}.")] = "given",
        pad_to: Annotated[
            int | None, typer.Option(min=1, help="Pad every batch to so many tokens.", show_default="the longest row's")
        ] = None,
        max_length: Annotated[
            int | None, typer.Option(min=1, help="Cut longer prompts to so many tokens.", show_default="none is cut")
        ] = None,
        max_new_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 32,
        seed: Annotated[int, typer.Option(help="Of shuffling and of the bootstrap.")] = 0,
        threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="torch's choice")] = None,
        output: Annotated[
            Path | None,
            typer.Option(metavar="DIR", help="For the report; an interrupted run goes on there.", show_default=False),
        ] = None,
        fail_over: Annotated[
            float | None,
            typer.Option(min=0.0, help="Exit with status 1 if a cell drifts by more than this.", show_default=False),
        ] = None,
        compare: Annotated[
            tuple[Path, Path] | None,
            typer.Option(metavar="OLD NEW", help="Compare two reports instead.", show_default=False),
        ] = None,
    ) -> None:
        """Measure how far a model's scores move between single and batched inference.

        Each row is run alone and in batches, at every combination of the options that may be repeated.
        """
        if compare is not None:
            raise typer.Exit(command.compare(*compare))
        for name, value in (("MODEL", model), ("DATA", data)):
            if value is None:
                raise typer.BadParameter("is needed, unless reports are compared with --compare", param_hint=name)
        settings: dict[str, Any] = {
            "model": model,
            "data": data,
            "task": task,
            "prompt": prompt,
            "reference": reference,
            "choices": choices,
            "messages": messages,
            "split": split,
            "limit": limit,
            "dtypes": dtype or None,
            "attentions": attention or None,
            "order": order,
            "pad_to": pad_to,
            "max_length": max_length,
            "max_new_tokens": max_new_tokens,
            "seed": seed,
        }
        several = {"paddings": padding, "batch_sizes": batch_size, "levels": level, "paths": path}
        settings |= {name: values for name, values in several.items() if values}
        raise typer.Exit(command.run(output, fail_over, threads, settings))

    @app.command()
    def diagnose(
        model: Annotated[str, typer.Argument(metavar="MODEL", help='A path, a Hub id, a .gguf file, or "smollm2".')],
        prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", show_default=False)] = None,
        data: Annotated[
            str | None,
            typer.Option(metavar="DATA", help="Prompts from a file or data set instead.", show_default=False),
        ] = None,
        prompt: Annotated[str, typer.Option(metavar="COLUMN", help="Column of the prompts in DATA.")] = "prompt",
        split: Annotated[str, typer.Option(metavar="NAME", help="Of a data set with several splits.")] = "test",
        limit: Annotated[int, typer.Option(min=1, help="Only the first so many rows of DATA.")] = 8,
        padding_side: Annotated[
            str | None, typer.Option(metavar="SIDE", help="left or right.", show_default="the tokenizer's")
        ] = None,
        attention_mask: Annotated[bool, typer.Option(help="Whether you pass an attention mask.")] = True,
        position_ids: Annotated[bool, typer.Option(help="Whether you pass position_ids with the prompts.")] = False,
        decode_position_ids: Annotated[
            bool, typer.Option(help="Whether you pass position_ids with decoded tokens.")
        ] = False,
        use_cache: Annotated[
            bool, typer.Option("--cache/--no-cache", help="Whether you decode with a KV cache.")
        ] = True,
        generate: Annotated[bool, typer.Option(help="Whether you call generate, instead of the model.")] = False,
        dtype: Annotated[
            str | None,
            typer.Option(metavar="NAME", help=" or ".join(DTYPES_OF_DRIFT), show_default="the model's"),
        ] = None,
        threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="torch's choice")] = None,
        json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Find out why a batch gives other results than its rows alone: a bug or rounding, and what to do."""
        if dtype is not None:
            _check("--dtype", dtype, DTYPES_OF_DRIFT)
        if not prompts and data is None:
            raise typer.BadParameter("give prompts, or --data", param_hint="PROMPT")
        rows = None if data is None else {"source": data, "prompt": prompt, "split": split, "limit": limit}
        usage = {
            "padding_side": padding_side,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "decode_position_ids": decode_position_ids,
            "use_cache": use_cache,
            "generate": generate,
        }
        raise typer.Exit(command.examine(model, prompts or [], rows, dtype, threads, json, usage))

    @app.command("convert-chatglm")
    def convert_chatglm(
        source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Directory of the checkpoint.")],
        target: Annotated[Path, typer.Argument(metavar="TARGET", help="Directory to write; must not exist.")],
        rope_scales: Annotated[
            str | None,
            typer.Option(
                metavar="WHAT",
                help=f"What rope_ratio scales: {' or '.join(ROPE_SCALES)}.",
                show_default="read in the model file beside the weights",
            ),
        ] = None,
        verify: Annotated[
            bool, typer.Option("--verify", help="Compare the logits of both; runs the checkpoint's own code.")
        ] = False,
        trust_remote_code: Annotated[
            bool, typer.Option("--trust-remote-code", help="Allow that code to run: read it first.")
        ] = False,
    ) -> None:
        """Convert a ChatGLM2, ChatGLM3 or GLM-4 checkpoint to transformers' GlmForCausalLM.

        The converted model needs none of the checkpoint's code, and every level runs it.
        """
        if rope_scales is not None:
            _check("--rope-scales", rope_scales, ROPE_SCALES)

        def work() -> int:
            from .chatglm import convert

            options: dict[str, Any] = {
                "rope_scales": rope_scales,
                "verify": verify,
                "trust_remote_code": trust_remote_code,
            }
            print(f"Written: {convert(source, target, **options)}")
            return 0

        raise typer.Exit(command.guarded(work, "interrupted; nothing was written"))

    return app


def _check(option: str, value: str, known: Iterable[str]) -> None:
    import typer

    if value not in known:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}", param_hint=option)


if __name__ == "__main__":
    main()
