"""`hal explain`: all candidates with their proofs, the states, and what else would fit."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence

import typer

from hal.cli.errors import REFUSED, reporting
from hal.cli.options import (
    Arch,
    AsJson,
    Config,
    Debug,
    Dtype,
    Graphs,
    PrefixCache,
    Providers,
    StateDtype,
    Tp,
    Tree,
    Where,
    Width,
)
from hal.cli.output import aligned
from hal.cli.question import answered, plugins_aside, question
from hal.decision import Decision, Question, alternatives
from hal.requirements import dtypes
from hal.selection import Explanation, proof_level
from hal_registry import Fault, Judged


def explain(
    config: Config,
    device: Where,
    arch: Arch = "",
    dtype: Dtype = None,
    state_dtype: StateDtype = None,
    tp: Tp = 1,
    speculative: Width = None,
    tree: Tree = False,
    prefix_cache: PrefixCache = False,
    graphs: Graphs = False,
    provider: Providers = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show every candidate with its proofs, the states, and what else would fit."""
    with reporting("explain", debug):
        asked = question(
            config,
            device,
            arch,
            dtype=dtype,
            state_dtype=state_dtype,
            tp=tp,
            speculative=speculative,
            tree=tree,
            prefix_cache=prefix_cache,
            graphs=graphs,
            providers=provider,
        )
        answer = answered(asked)
        with plugins_aside():  # other devices are judged for the text
            text = json.dumps(_plain(answer), indent=1) if as_json else "\n".join(_lines(answer))
    typer.echo(text)
    if not answer.fits:
        raise typer.Exit(REFUSED)


def _lines(answer: Explanation) -> Iterator[str]:
    yield str(answer)
    decision = answer.decision
    if decision.judged:
        yield "Candidates"
    for judged in decision.judged:
        yield f"  {judged.candidate}"
        yield from aligned(_operations(decision, judged), indent=4)
    yield from _states(answer)
    others = _others(decision)
    yield from _section("Faults", [(f.name, f.code, f.error) for f in _faults(decision.question)])
    yield from _section("Other devices", others)


def _section(title: str, rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    if rows:
        yield title
        yield from aligned(rows, indent=2)


def _operations(decision: Decision, judged: Judged) -> list[tuple[str, ...]]:
    """Each operation that is needed: whether the candidate fits, how it is proved, or why not."""
    model, question = decision.model, decision.question
    dtype = dtypes(model, question.options)[0] if model else ""
    optional = {need.operation for need in decision.needs if need.optional}
    return [
        (
            operation + (" (optional)" if operation in optional else ""),
            "; ".join(map(str, reasons))
            or f"fits, {proof_level(judged.candidate, operation, dtype, question.device.arch)}",
        )
        for operation, reasons in judged.reasons.items()
    ]


def _states(answer: Explanation) -> Iterator[str]:
    if answer.selection is None:
        return
    kinds = Counter((s.name, s.shape, s.dtype, s.layout, s.bytes) for s in answer.selection.states)
    yield "States"
    yield from aligned(
        [
            (name, f"{n} layers", str(list(shape)), dtype, layout or "-", f"{size:,} bytes")
            for (name, shape, dtype, layout, size), n in kinds.items()
        ],
        indent=2,
    )


def _faults(question: Question) -> tuple[Fault, ...]:
    return question.registry.faults_on(question.device.type)


def _others(decision: Decision) -> list[tuple[str, str]]:
    """What would run the same on other devices, by their manifests."""
    fits = dict(alternatives(decision.question, decision.needs)) if decision.needs else {}
    devices = decision.question.registry.devices() if decision.needs else ()
    here = decision.question.device.type
    return [(d, f"{fits[d]} fits" if d in fits else "does not fit") for d in devices if d != here]


def _plain(answer: Explanation) -> dict[str, object]:
    """The answer with its candidates, as plain data."""
    decision = answer.decision
    return {
        **answer.to_dict(),
        "candidates": [
            {
                "name": judged.candidate.name,
                "distribution": judged.candidate.distribution,
                "version": judged.candidate.version,
                "operations": {
                    operation: [reason.to_dict() for reason in reasons]
                    for operation, reasons in judged.reasons.items()
                },
            }
            for judged in decision.judged
        ],
        "other_devices": dict(_others(decision)),
    }
