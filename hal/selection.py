"""`select` decides once, before a weight is loaded; `explain` says why, without the device."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from hal.decision import Decision, Question, decide
from hal.device import Device
from hal.model.spec import ModelSpec
from hal.options import Options, Shard, Speculative
from hal.refusal import Refusal, Unsupported
from hal.requirements import dtypes
from hal.states import StateFormat, StateSpec, plan_states
from hal_registry import LEVELS, Assignment, Candidate, Registry, default_registry

if TYPE_CHECKING:
    from hal.runtime.backend import Backend
    from hal.runtime.full_attention import FullAttention
    from hal.runtime.hybrid import HybridBackend
    from hal.runtime.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Choice:
    """Who serves an operation, from which distribution, and how far it is proved."""

    provider: str
    distribution: str
    version: str
    proof: str
    candidate: Candidate

    def to_dict(self) -> dict[str, str]:
        """The choice as plain data."""
        return {
            "provider": self.provider,
            "distribution": self.distribution,
            "version": self.version,
            "proof": self.proof,
        }


@dataclass(frozen=True, slots=True)
class Selection:
    """The providers of every operation and the plan of all states; binding it gives a backend."""

    device: Device
    model: ModelSpec
    options: Options
    choices: Mapping[str, Choice]
    states: tuple[StateSpec, ...]
    layouts: Mapping[str, str]

    @property
    def dtype(self) -> str:
        """The activation dtype."""
        return self.options.dtype or self.model.dtype

    @property
    def slot_bytes(self) -> int:
        """State bytes of one slot over all layers of this rank."""
        return sum(state.bytes for state in self.states)

    def explain(self) -> str:
        """Which provider does what, from which distribution and version, proved how."""
        return "\n".join(self._lines())

    def __str__(self) -> str:
        """The explanation."""
        return self.explain()

    def _lines(self) -> Iterator[str]:
        layers = sum(1 for _ in self.model.stateful_layers())
        yield (
            f"{self.model.model_type} runs on {self.device}: {layers} of "
            f"{len(self.model.layers)} layers keep state, {self.slot_bytes:,} bytes a slot"
        )
        width = max(map(len, self.choices))
        for operation, choice in self.choices.items():
            origin = f"{choice.provider}  ({choice.distribution} {choice.version})"
            yield f"  {operation:{width}}  {origin}  {choice.proof}"

    def to_dict(self) -> dict[str, object]:
        """The selection as plain data."""
        return {
            "fits": True,
            "model_type": self.model.model_type,
            "device": str(self.device),
            "dtype": self.dtype,
            "choices": {op: choice.to_dict() for op, choice in self.choices.items()},
            "layouts": dict(self.layouts),
            "slot_bytes": self.slot_bytes,
            "states": [state.to_dict() for state in self.states],
        }

    @overload
    def backend(
        self,
        slots: int,
        max_batch: int,
        max_tokens: int,
        *,
        device_index: int | None = None,
        ranks: "Ranks | None" = None,
        full: None = None,
    ) -> "Backend": ...

    @overload
    def backend(
        self,
        slots: int,
        max_batch: int,
        max_tokens: int,
        *,
        full: "FullAttention",
        device_index: int | None = None,
        ranks: "Ranks | None" = None,
    ) -> "HybridBackend": ...

    def backend(
        self,
        slots: int,
        max_batch: int,
        max_tokens: int,
        *,
        device_index: int | None = None,
        ranks: "Ranks | None" = None,
        full: "FullAttention | None" = None,
    ) -> "Backend | HybridBackend":
        """Allocate the pool and bind the providers; torch is imported here.

        `slots` is the number of allocatable slots; slot 0 is reserved and comes on top. `full` is
        the engine's own attention, composed with the linear layers. `ranks` is needed where tensor
        parallelism cuts a group of a scan's norm.
        """
        from hal.runtime.backend import Backend
        from hal.runtime.hybrid import HybridBackend

        linear = Backend(self, slots, max_batch, max_tokens, device_index=device_index, ranks=ranks)
        return linear if full is None else HybridBackend(full, linear)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer of `explain`: a selection or a refusal, never an exception for a bad pair.

    `decision` holds what it rests on: the requirements, and every candidate as it was judged.
    """

    selection: Selection | None
    refusal: Refusal | None
    decision: Decision

    @property
    def fits(self) -> bool:
        """Whether the model can run there."""
        return self.selection is not None

    def to_dict(self) -> dict[str, object]:
        """The answer as plain data."""
        answer = self.selection or self.refusal
        return answer.to_dict() if answer is not None else {}

    def __str__(self) -> str:
        """The answer's text."""
        return str(self.selection or self.refusal)


def select(
    device: object,
    model_config: object,
    *,
    dtype: object = None,
    state_dtype: object = None,
    tp: Shard | None = None,
    speculative: Speculative | None = None,
    prefix_cache: bool | int = False,
    graphs: bool = False,
    providers: Mapping[str, str] | None = None,
    registry: Registry | None = None,
) -> Selection:
    """Choose the providers for a model on a device, or raise `Unsupported` with every reason.

    `device` is "cuda", "cuda:0", "cuda:sm_90", "npu", ...; `model_config` a transformers config, a
    mapping or a path. "cuda" is "rocm" where torch was built for ROCm. The device is probed and the
    chosen providers are imported; nothing runs.
    """
    options = make_options(dtype, state_dtype, tp, speculative, prefix_cache, graphs, providers)
    return choose(device, model_config, options, registry)


def choose(
    device: object, model_config: object, options: Options, registry: Registry | None = None
) -> Selection:
    """`select` with its options in one record."""
    from hal.binding import Examination, located

    place = located(Device.parse(device))
    question = Question(place, model_config, options, registry or default_registry())
    decision = decide(question, Examination(place))
    answer = _answer(decision)
    if isinstance(answer, Refusal):
        raise Unsupported(answer)
    return answer


def explain(
    device: object,
    model_config: object,
    *,
    dtype: object = None,
    state_dtype: object = None,
    tp: Shard | None = None,
    speculative: Speculative | None = None,
    prefix_cache: bool | int = False,
    graphs: bool = False,
    providers: Mapping[str, str] | None = None,
    registry: Registry | None = None,
) -> Explanation:
    """Judge by manifests alone: no torch, no device, and a refusal is an answer, not an error."""
    options = make_options(dtype, state_dtype, tp, speculative, prefix_cache, graphs, providers)
    place = Device.parse(device)
    return judge_only(Question(place, model_config, options, registry or default_registry()))


def judge_only(question: Question) -> Explanation:
    """`explain` with its arguments in one record."""
    decision = decide(question)
    answer = _answer(decision)
    if isinstance(answer, Refusal):
        return Explanation(None, answer, decision)
    return Explanation(answer, None, decision)


def make_options(
    dtype: object,
    state_dtype: object,
    tp: Shard | None,
    speculative: Speculative | None,
    prefix_cache: bool | int,
    graphs: bool,
    providers: Mapping[str, str] | None,
) -> Options:
    """The keyword arguments of `select` as one record."""
    return Options(
        dtype=None if dtype is None else str(dtype),
        state_dtype=None if state_dtype is None else str(state_dtype),
        tp=Shard() if tp is None else tp,
        speculative=speculative,
        prefix_cache=prefix_cache,
        graphs=graphs,
        providers={} if providers is None else providers,
    )


def _answer(decision: Decision) -> Selection | Refusal:
    """The decision for callers: the plugins' vetoes come last, and see a complete selection."""
    if decision.refusal is not None or decision.assignment is None or decision.model is None:
        if decision.refusal is None:
            raise RuntimeError("a decision without an assignment has to carry a refusal")
        return decision.refusal
    options, model, assignment = decision.question.options, decision.model, decision.assignment
    form = StateFormat(assignment.layouts, *dtypes(model, options))
    selection = Selection(
        decision.question.device,
        model,
        options,
        _choices(assignment, form.dtype, decision.question.device),
        plan_states(model, options.tp.size, form),
        assignment.layouts,
    )
    vetoes = decision.question.registry.vetoes(selection)
    return Refusal(model.model_type, str(selection.device), vetoes) if vetoes else selection


def _choices(assignment: Assignment, dtype: str, device: Device) -> dict[str, Choice]:
    return {
        operation: Choice(
            c.name, c.distribution, c.version, proof_level(c, operation, dtype, device.arch), c
        )
        for operation, c in assignment.choices.items()
    }


def proof_level(candidate: Candidate, operation: str, dtype: str, arch: str = "") -> str:
    """The strongest proof for a dtype and, where given, an arch; "unproved" where none is."""
    levels = {
        proof.level
        for proof in candidate.manifest.proofs
        if proof.operation == operation
        and proof.dtype == dtype
        and (not arch or proof.arch in ("", arch))
    }
    return next((level for level in LEVELS if level in levels), "unproved")
