"""`hal matrix`: which families run on which devices with what is installed, and how proved."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Final

import typer

from hal.cli.errors import reporting
from hal.cli.options import AsJson, Debug
from hal.cli.output import aligned, markdown
from hal.cli.question import answered, installed
from hal.decision import Question
from hal.device import Device
from hal.model.families import FAMILIES
from hal.options import Options
from hal.selection import Explanation
from hal_registry import LEVELS, Candidate, Code, Registry

AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print docs/support-matrix.md.")]

SIZES: Final[Mapping[str, object]] = {
    "num_hidden_layers": 48,
    "hidden_size": 4096,
    "vocab_size": 65536,
    "num_attention_heads": 32,
    "dtype": "bfloat16",
}
"""A usual size; what it leaves out has the family's own defaults."""

OWN: Final[Mapping[str, Mapping[str, object]]] = {
    "falcon_h1": {"mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_head": 64},
    "glm5_next_text": {"num_attention_heads": 64},
    "kimi_linear": {
        "linear_attn_config": {
            "kda_layers": [n for n in range(1, 49) if n % 4],
            "full_attn_layers": [n for n in range(1, 49) if n % 4 == 0],
        }
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 16},
    "nemotron_h": {"num_hidden_layers": 48, "hybrid_override_pattern": "M-M-M*E-" * 6},
    "zamba2": {"num_hidden_layers": 54, "n_mamba_heads": 128},
}
"""What a family's config has to say beside the usual size."""

MAX_REASON: Final = 60


def matrix(as_markdown: AsMarkdown = False, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show which families run on which devices with what is installed, and how that is proved.

    Each family is asked at a usual size, in bfloat16; `hal check` answers for one config.
    """
    with reporting("matrix", debug):
        registry = installed()
        devices = registry.devices()
        found = {name: _answers(name, devices, registry) for name in sorted(FAMILIES)}
        if as_json:
            typer.echo(json.dumps(_plain(found, registry), indent=1))
        elif as_markdown:
            typer.echo("\n".join(_page(found, registry)))
        else:
            typer.echo("\n".join(aligned([("family", *devices), *_rows(found)])))


def example(family: str) -> dict[str, object]:
    """A config of the family, of a usual size."""
    return {**SIZES, **OWN.get(family, {}), "model_type": family}


def _answers(family: str, devices: tuple[str, ...], registry: Registry) -> dict[str, Explanation]:
    config = example(family)
    return {d: answered(Question(Device(d), config, Options(), registry)) for d in devices}


def _rows(found: Mapping[str, Mapping[str, Explanation]]) -> list[tuple[str, ...]]:
    return [(name, *map(_cell, answers.values())) for name, answers in found.items()]


def _cell(answer: Explanation) -> str:
    """The providers and their weakest proof, or what is missing first."""
    if answer.selection is not None:
        choices = answer.selection.choices.values()
        levels = [*LEVELS, "unproved"]
        weakest = max((choice.proof for choice in choices), key=levels.index)
        return f"{' + '.join(dict.fromkeys(c.provider for c in choices))}: {weakest}"
    if answer.refusal is None:
        return "no"
    first, *others = answer.refusal.all_reasons()
    whole = first.code is Code.INTERFACE_MISSING
    same = [reason.subject for reason in others if whole and reason.code is first.code]
    return f"no: {first.code} {', '.join(dict.fromkeys((first.subject, *same)))}"


def _proofs(candidate: Candidate) -> Iterator[tuple[str, ...]]:
    for proof in candidate.manifest.proofs:
        yield (
            candidate.name,
            proof.operation,
            proof.dtype,
            proof.arch or "any",
            proof.level,
            proof.date or "-",
            proof.versions or "-",
            proof.report or "-",
        )


PROOF_HEADER: Final = (
    "provider",
    "operation",
    "dtype",
    "arch",
    "level",
    "date",
    "versions",
    "report",
)


def _page(found: Mapping[str, Mapping[str, Explanation]], registry: Registry) -> Iterator[str]:
    """docs/support-matrix.md."""
    yield "# Support matrix"
    yield ""
    yield "Made by `hal matrix --markdown` from the manifests of the installed providers; a test"
    yield "holds this page against them. Each family is asked at a usual size, in bfloat16, with no"
    yield "options; a cell names the providers and the weakest proof among the operations they"
    yield "serve, or the first reason against it ([reason codes](reason-codes.md))."
    yield ""
    yield from markdown(("family", *registry.devices()), _rows(found))
    yield ""
    yield "## Proofs"
    yield ""
    yield "`hardware`: ran on the device. `interpreter`: the same source ran elsewhere. `compiled`:"
    yield "it was built, no more. An operation that is not listed is unproved. Proofs by hardware"
    yield "rest on a report of the conformance kit, which `make report PROVIDER=NAME` makes anew; a"
    yield "test holds it against the manifest."
    yield ""
    yield from markdown(
        PROOF_HEADER, _grouped(row for c in registry.candidates for row in _proofs(c))
    )


def _grouped(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Proofs that differ in dtype and arch alone as one row that lists both."""
    lists: dict[tuple[str, ...], tuple[dict[str, None], dict[str, None]]] = {}
    for provider, operation, dtype, arch, *rest in rows:
        dtypes, arches = lists.setdefault((provider, operation, *rest), ({}, {}))
        dtypes[dtype] = arches[arch] = None
    return [
        (provider, operation, ", ".join(dtypes), ", ".join(arches), *rest)
        for (provider, operation, *rest), (dtypes, arches) in lists.items()
    ]


def _plain(found: Mapping[str, Mapping[str, Explanation]], registry: Registry) -> dict[str, Any]:
    return {
        "families": {
            name: {device: answer.to_dict() for device, answer in answers.items()}
            for name, answers in found.items()
        },
        "proofs": [
            dict(zip(PROOF_HEADER, row, strict=True))
            for candidate in registry.candidates
            for row in _proofs(candidate)
        ],
    }
