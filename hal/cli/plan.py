"""`hal plan`: what a model's requests cost on a device, without torch and without the device."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from hal.capacity import RESERVE, Capacity, Load, capacity, decode_bound
from hal.cards import CARDS
from hal.cli.errors import REFUSED, reporting
from hal.cli.options import Arch, AsJson, Config, Debug, Dtype, StateDtype, Tp, Where, Width
from hal.cli.output import aligned, read_bytes, read_tokens, show_bytes
from hal.cli.question import answered, question
from hal.decision import Question
from hal.model.source import text_config
from hal.requirements import dtypes
from hal.selection import Explanation
from hal.states import StateFormat, StateSpec, plan_states
from hal.weights import WeightBytes, weight_bytes

Memory = Annotated[str | None, typer.Option(help="Of one card, as 141GiB.")]
Bandwidth = Annotated[str | None, typer.Option(help="Of one card, as 4.8TB/s.")]
KnownCard = Annotated[str | None, typer.Option("--card", help=f"One of {', '.join(CARDS)}.")]
Context = Annotated[str, typer.Option(help="Tokens of a request, as 32k.")]
Weights = Annotated[str | None, typer.Option(help="Bytes of all weights, as 24GiB.")]

USUAL: Final = {"conv": "CW", "recurrent": "VK", "scan": "PN"}
"""Layouts to plan with where no provider fits; bytes differ only for a ring."""

BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def plan(
    config: Config,
    device: Where,
    memory: Memory = None,
    bandwidth: Bandwidth = None,
    card: KnownCard = None,
    tp: Tp = 1,
    context: Context = "32k",
    arch: Arch = "",
    dtype: Dtype = None,
    state_dtype: StateDtype = None,
    speculative: Width = None,
    weights: Weights = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Plan memory: KV and state bytes a request, the requests that fit, the bound on decoding.

    Weight bytes come from the safetensors headers in the folder of CONFIG, or from --weights.
    """
    with reporting("plan", debug):
        asked = question(
            config,
            device,
            arch,
            dtype=dtype,
            state_dtype=state_dtype,
            tp=tp,
            speculative=speculative,
        )
        answer = answered(asked)
        room, speed = _card(card, memory, bandwidth)
        load = _load(answer, read_tokens(context, "--context"), _weights(config, weights))
        if load is None:
            typer.echo(str(answer))
            raise typer.Exit(REFUSED)
        found = capacity(load, room)
        facts = _facts(answer, load, found, room, speed)
    typer.echo(json.dumps(facts, indent=1) if as_json else "\n".join(_lines(facts)))


def _card(name: str | None, memory: str | None, speed: str | None) -> tuple[int | None, int | None]:
    """Memory and bandwidth: the options, else those of the card."""
    if name is not None and name not in CARDS:
        raise ValueError(f"--card {name}: expected one of {', '.join(CARDS)}")
    card = CARDS[name] if name else None
    room = card.memory if card else None
    rate = card.bandwidth if card else None
    return (
        read_bytes(memory, "--memory") if memory else room,
        read_bytes(speed, "--bandwidth") if speed else rate,
    )


def _weights(config: str, given: str | None) -> WeightBytes | None:
    if given is not None:
        return WeightBytes(read_bytes(given, "--weights"))
    path = Path(config)
    return weight_bytes(path if path.is_dir() else path.parent) if path.exists() else None


def _load(answer: Explanation, context: int, weights: WeightBytes | None) -> Load | None:
    """What to plan; a model that no provider of the device fits is planned in usual layouts."""
    decision = answer.decision
    model, asked = decision.model, decision.question
    if model is None or not decision.needs:
        return None
    return Load(
        model,
        answer.selection.states if answer.selection else _usual(answer, asked),
        dtypes(model, asked.options)[0],
        asked.options.tp.size,
        context,
        asked.options.speculative.width if asked.options.speculative else 0,
        weights,
        _expert_share(text_config(str(asked.config))),
    )


def _usual(answer: Explanation, asked: Question) -> tuple[StateSpec, ...]:
    model = answer.decision.model
    if model is None:
        return ()
    form = StateFormat(USUAL, *dtypes(model, asked.options))
    return plan_states(model, asked.options.tp.size, form)


def _expert_share(config: Mapping[str, Any]) -> float:
    """The share of routed experts that a token reads, 1 where the config does not say."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((config[n] for n in names if isinstance(config.get(n), int)), 0)
    chosen = config.get("num_experts_per_tok")
    return chosen / experts if isinstance(chosen, int) and 0 < chosen <= experts else 1.0


def _facts(
    answer: Explanation, load: Load, found: Capacity, memory: int | None, speed: int | None
) -> dict[str, Any]:
    largest = BATCHES[-1] if found.requests is None else found.requests
    sizes = sorted({n for n in BATCHES if n < largest} | ({largest} if largest else set()))
    bounds = {n: decode_bound(load, n, speed) for n in sizes} if speed else {}
    return {
        "model_type": load.model.model_type,
        "device": str(answer.decision.question.device),
        "fits": answer.fits,
        "notes": list(_notes(answer, load)),
        "dtype": load.dtype,
        "tp": load.tp,
        "context": load.context,
        "memory": memory,
        "bandwidth": speed,
        **found.to_dict(),
        "decode_tokens_per_second": {str(n): b and round(b, 1) for n, b in bounds.items()},
    }


def _notes(answer: Explanation, load: Load) -> Iterator[str]:
    if answer.refusal is not None:
        yield f"not served as asked: {answer.refusal.headline()}"
    if load.weights is not None and load.expert_share < 1 and not load.weights.experts:
        yield (
            "the bound counts every expert as read at each step; a folder with safetensors tells "
            "experts from the rest"
        )


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """The plan as text: every line names what it counts."""
    where = f"on one of {facts['tp']} ranks" if facts["tp"] > 1 else "on one card"
    yield (
        f"{facts['model_type']} on {facts['device']}, {facts['dtype']}, {where}, "
        f"requests of {facts['context']:,} tokens"
    )
    yield from (f"Note: {note}" for note in facts["notes"])
    yield from aligned(_rows(facts), indent=2)
    bounds = facts["decode_tokens_per_second"]
    if bounds and None not in bounds.values():
        yield "Decode, tokens a second that memory bandwidth allows at most"
        yield from aligned([(f"batch {n}", f"{bound:,.0f}") for n, bound in bounds.items()], 2)


def _rows(facts: Mapping[str, Any]) -> list[tuple[str, ...]]:
    def size(title: str, name: str, how: str = "") -> tuple[str, str, str]:
        value = facts[name]
        known = (show_bytes(value), f"{value:,} bytes") if value is not None else None
        return (title, *(known or ("unknown", how)))

    requests = facts["requests"]
    fit = "unknown" if requests is None else f"{requests:,}"
    return [
        size("KV a request", "kv"),
        size("KV a further token", "kv_per_token"),
        size("state a request", "state"),
        *([size("scratch a request, at most", "scratch")] if facts["scratch"] else []),
        size("all of a request", "request"),
        size("weights", "weights", "give a folder with safetensors, or --weights"),
        size("memory", "memory", "give --memory or --card"),
        ("requests that fit", fit, f"{RESERVE:.0%} of the memory is kept free"),
        ("slots for them", fit, "and slot 0, which is reserved"),
    ]
