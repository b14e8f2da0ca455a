"""What to compute: a model, an optimizer, a global batch and a sequence length. Prints as one line and parses back."""

import dataclasses
from collections.abc import Mapping

from jaxmem import spec
from jaxmem.models import configs as models
from jaxmem.models.configs import MODELS, DecoderConfig, ModelConfig
from jaxmem.optim import configs as optimizers
from jaxmem.optim.configs import OPTIMIZERS, OptimizerConfig
from jaxmem.spec import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """`batch` is global, in sequences or images; `seq` is tokens a sequence or patches an image. The names are the presets that the
    configs began as."""

    model: ModelConfig
    model_name: str
    optimizer: OptimizerConfig
    optimizer_name: str
    batch: int
    seq: int

    @classmethod
    def parse(cls, *, model: str, optimizer: str = "adamw", batch: int | str, seq: int | str | None = None,
              usual_seq: int | None = None) -> "Workload":
        """`parse(model="llama3-8b,layers=4", optimizer="adamw,b2=0.95", batch=64, seq=8192)`; raises `InputError`.

        Without `seq` a model of images has its own, and a model of text takes `usual_seq` or as many positions as it has.
        """
        config = spec.parse_preset(MODELS, model, what="model")
        seq = models.seq_for(config, usual_seq) if seq is None else seq
        if seq is None:
            raise InputError(f"{spec.split(model)[0]} needs seq=N, the tokens of a sequence")
        workload = cls(model=config, model_name=spec.split(model)[0],
                       optimizer=spec.parse_preset(OPTIMIZERS, optimizer, what="optimizer"),
                       optimizer_name=spec.split(optimizer)[0], batch=_whole("batch", batch), seq=_whole("seq", seq))
        problems = workload.problems()
        if problems:
            raise InputError("\n".join(problems))
        return workload

    @classmethod
    def parse_line(cls, text: str) -> "Workload":
        """The line that `str` prints: `model=llama3-8b,layers=4,optimizer=adamw,batch=64,seq=8192`, parts in any order.

        Fields after `model=NAME` belong to the model and those after `optimizer=NAME` to the optimizer.
        """
        parts: dict[str, list[str]] = {}
        part = ""
        for item in spec.split(text):
            name, _, value = item.partition("=")
            name, value = name.strip(), value.strip()
            if name in ("model", "optimizer", "batch", "seq"):
                if name in parts:
                    raise InputError(f"workload: {name!r} is given twice")
                parts[name] = [value]
                part = name
            elif part in ("model", "optimizer"):
                parts[part].append(item)
            else:
                words = ("model", "optimizer", "batch", "seq")
                raise InputError(f"workload: {item!r} belongs to no part; fields follow their model= or optimizer="
                                 f"{spec.nearest(name, words)}")
        known = MODELS.get(parts.get("model", [""])[0])
        needed = ("model", "batch", "seq") if known is None or models.own_seq(known) is None else ("model", "batch")
        missing = [name for name in needed if not parts.get(name, [""])[0]]
        if missing:
            raise InputError(f"workload {text!r}: {', '.join(missing)} missing; "
                             "a workload is model=NAME,optimizer=NAME,batch=N,seq=N")
        return cls.parse(model=",".join(parts["model"]), optimizer=",".join(parts.get("optimizer", ["adamw"])),
                         batch=parts["batch"][0], seq=parts["seq"][0] if "seq" in parts else None)

    def __str__(self) -> str:
        return f"model={self.model_text},optimizer={self.optimizer_text},batch={self.batch},seq={self.seq}"

    @property
    def model_text(self) -> str:
        """`llama3-8b,layers=4`: the value of a `--model` flag."""
        return _text(self.model_name, self.model, MODELS)

    @property
    def optimizer_text(self) -> str:
        """`adamw,b2=0.95`: the value of an `--optimizer` flag."""
        return _text(self.optimizer_name, self.optimizer, OPTIMIZERS)

    @property
    def tokens(self) -> int:
        """Tokens a step; for images patches."""
        return self.batch * self.seq

    @property
    def rows(self) -> models.Rows:
        """`{field: (shape, dtype)}` of one row of the batch."""
        return models.batch_rows(self.model, self.seq)

    def problems(self) -> list[str]:
        """Every reason why this cannot be computed on any machine, with the numbers and what would work."""
        found = models.problems(self.model) + optimizers.problems(self.optimizer)
        for name, value in (("batch", self.batch), ("seq", self.seq)):
            if value <= 0:
                found.append(f"{name}={value}: expected at least 1")
            if value >= 2**31:
                found.append(f"{name}={value}: expected less than {2**31}")
        if self.model.parameters > 10**15:
            found.append(f"{self.model_name}: {self.model.parameters:.3g} parameters; expected at most 1e15")
        own = None if found else models.own_seq(self.model)  # a model of images that is nonsense may have none
        if own is not None and self.seq != own:
            found.append(f"seq={self.seq}: {self.model_name} has seq={own}, {'the patches of an image' if own > 1 else 'an image'}; "
                         "leave seq out")
        if isinstance(self.model, DecoderConfig) and self.model.positions == "learned" and self.seq > self.model.max_positions > 0:
            found.append(f"seq={self.seq} is beyond the {self.model.max_positions} learned positions of {self.model_name}; "
                         f"use seq={self.model.max_positions} or less, or a longer table with max_positions={self.seq}")
        return found


def _whole(name: str, value: int | str) -> int:
    try:
        return int(value)
    except ValueError:
        raise InputError(f"{name}={value}: expected a whole number") from None


def _text[T](name: str, config: T, presets: Mapping[str, T]) -> str:
    return ",".join([name, *spec.differences(config, presets[name])])
