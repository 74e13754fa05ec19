"""The commands. Each parses its flags and calls the module that does the work."""

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import anyio
import typer
from rich.console import Console

from services.cli import bench, keys, queue
from services.cli.errors import CommandError
from services.cli.options import UpOptions
from shared.clock import SystemClock
from shared.errors import BatonError

app = typer.Typer(
    name="baton",
    help="Disaggregated LLM serving: prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Port = Annotated[int, typer.Option(help="The stack's port.", min=1, max=65535)]
app.add_typer(queue.app)
app.add_typer(keys.app)
app.add_typer(bench.app)


@app.command()
def up(
    prefill: Annotated[int, typer.Option(help="Prefill workers; 0 = aggregated: decode workers do both.")] = 1,
    decode: Annotated[int, typer.Option(help="Decode workers.")] = 1,
    model: Annotated[
        str | None,
        typer.Option(
            help="A .gguf file, a folder with safetensors, or owner/name on the Hugging Face hub, "
            "where huggingface_hub is installed. Default: SmolLM2-135M."
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port of the API (default 8000; 0 = any free one).")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (default 127.0.0.1).")] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once ready; 'baton down' stops it.")] = False,
    config: Annotated[Path | None, typer.Option(help="TOML file; the flags here win over it.")] = None,
    redis_url: Annotated[str | None, typer.Option(help="A Redis of yours (default: a private one).")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="KV blocks per worker (default: from free memory).")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences in one step, at most.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens in one step, at most.")] = None,
    transport: Annotated[str | None, typer.Option(help="How blocks travel: shm, tcp or shm,tcp.")] = None,
    memory_fraction: Annotated[
        float | None, typer.Option(help="Part of the free memory for all workers together (default 0.5).")
    ] = None,
    memory_limit: Annotated[str | None, typer.Option(help="Memory for all workers together, e.g. 4GiB.")] = None,
    quantize: Annotated[str | None, typer.Option(help="Weights: auto (as stored), int8 or float32.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="KV cache: float16, bfloat16, int8, fp8 or float32.")] = None,
) -> None:
    """Start Redis and all services, and keep them alive. Ctrl-C drains and stops."""
    options = UpOptions(
        prefill=prefill,
        decode=decode,
        model=model,
        port=port,
        host=host,
        detach=detach,
        config=config,
        redis_url=redis_url,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        transport=transport,
        memory_fraction=memory_fraction,
        memory_limit=memory_limit,
        quantize=quantize,
        kv_dtype=kv_dtype,
    )
    _up(options)


def _up(options: UpOptions) -> None:
    from services.cli.detach import detach
    from services.cli.stack import Stack, say

    clock = SystemClock()
    stack = Stack(options, clock, say, show_logs=not options.detach)
    workers = ", ".join(f"{n} {what}" for n, what in ((options.prefill, "prefill"), (options.decode, "decode")) if n)
    print(f"Starting {stack.plan.settings.model.name} on port {stack.plan.settings.gateway.port} ({workers}) ...")
    sys.stdout.flush()
    if options.detach:
        print(detach(stack.run_dir.logs / "supervisor.log", lambda tell: anyio.run(stack.run, tell)))
        print(f"  stop     ./baton down --port {stack.run_dir.port}")
    else:
        anyio.run(stack.run, lambda text: print(text, flush=True))
        print("Stopped.")


@app.command()
def down(port: Port = 8000) -> None:
    """Drain the stack on a port and stop it."""
    from services.cli.down import stop
    from services.cli.rundir import RunDir

    print(anyio.run(stop, RunDir(port), SystemClock()))


@app.command()
def status(port: Annotated[int | None, typer.Option(help="One stack only.", min=1, max=65535)] = None) -> None:
    """Show the running services, their health and their key figures."""
    from services.cli.status import metrics_text, running, table

    found = running(port)
    if not found:
        raise CommandError("nothing runs" + (f" on port {port}" if port else "") + "; './baton up' starts it")
    console = Console()
    for _, state in found:
        console.print(anyio.run(table, state))
        print(metrics_text(state))


@app.command()
def chat(
    message: Annotated[str | None, typer.Option("--message", "-m", help="One message; print the answer.")] = None,
    system: Annotated[str, typer.Option(help="A system prompt.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Length of an answer, at most.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 = always the likeliest token.")] = None,
    port: Port = 8000,
    url: Annotated[str, typer.Option(help="Another server, e.g. http://10.0.0.5:8000.")] = "",
    api_key: Annotated[str, typer.Option(help="A key, where one is asked for.", envvar="OPENAI_API_KEY")] = "",
) -> None:
    """Talk to the model in the terminal."""
    from services.cli.chat import Conversation
    from services.cli.chat import chat as converse

    address = url.rstrip("/").removesuffix("/v1") or f"http://127.0.0.1:{port}"
    converse(Conversation(address, system, max_tokens, temperature, api_key), message)


@app.command("test", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run_pytest(
    context: typer.Context,
    full: Annotated[bool, typer.Option("--full", help="The long matrix too.")] = False,
) -> None:
    """Run the tests. Further arguments go to pytest."""
    from services.cli.checks import run_tests

    run_tests(context.args, full=full)


@app.command()
def check(
    tests: Annotated[bool, typer.Option(help="Run the tests too.")] = True,
    sanitize: Annotated[bool, typer.Option("--sanitize", help="And the kernels' under ASan and UBSan.")] = False,
    scalar: Annotated[bool, typer.Option("--scalar", help="And the kernels' built without AVX2.")] = False,
    avx512: Annotated[bool, typer.Option("--avx512", help="And the kernels' for AVX-512, through SIMDe.")] = False,
) -> None:
    """Lint, format check, type check and tests: all that a change must pass."""
    from services.cli.checks import run_checks

    variants = [name for name, wanted in (("sanitize", sanitize), ("scalar", scalar), ("avx512", avx512)) if wanted]
    if failed := run_checks(tests=tests, variants=variants):
        raise CommandError(f"failed: {', '.join(failed)}")
    print("All checks passed.")


def main() -> NoReturn:
    """Entry point: a fault of the world is one line and exit code 1."""
    try:
        app(prog_name="baton")
        sys.exit(0)
    except BatonError as exc:
        details = getattr(exc, "details", "")
        print(f"baton: {exc}" + (f"\n{details}" if details else ""), file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
