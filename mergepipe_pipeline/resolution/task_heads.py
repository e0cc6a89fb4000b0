"""Adapters that make a classifier of a language model: PEFT saves the new head with the adapter.

The head that predicts tokens goes, the classifier's comes, and the config follows. Only where the
adapter keeps all that the class has beyond the language model: other classes have layers that were
drawn at random in training and are saved nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mergepipe_pipeline.checkpoints.adapter_config import CONFIG, parse_adapter_config
from mergepipe_pipeline.checkpoints.adapter_names import find_changes, whole_name
from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.domain.layers import embedding_like, is_post
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.plan import ConfigValue
from mergepipe_pipeline.domain.view import view_of
from mergepipe_pipeline.errors import IncompatibleCheckpointsError

#: The end of a class's name, by the task of an adapter's config.
_CLASSES = {"SEQ_CLS": "ForSequenceClassification", "TOKEN_CLS": "ForTokenClassification"}
#: Architectures whose classifiers have one module more than the model below the head, by its name.
_COMPLETE = {
    "score": re.compile(r"(.+)(?<!With)(?:ForCausalLM|LMHeadModel)"),
    "classifier": re.compile(r"(\w*(?:Roberta|Camembert)\w*)ForMaskedLM"),
}
#: Heads that predict tokens, with layers of their own.
_TOKEN_HEAD = re.compile(r"(?:^|\.)lm_head\.")


def classifier_of(architecture: str, model_type: str, head: str, task: str) -> str | None:
    """The class that a language model with a module `head` is for a task; None if it lacks more."""
    match = _COMPLETE[head].fullmatch(architecture) if head in _COMPLETE else None
    if match is None or task not in _CLASSES:
        return None
    # The text part of a model that sees is named so in classifiers alone.
    part = "Text" if model_type.endswith("_text") and task == "SEQ_CLS" else ""
    return f"{match[1]}{part}{_CLASSES[task]}"


def as_classifier(model: Model, adapter: Checkpoint) -> Model:
    """The model that a classifier's adapter was trained on, with the adapter's head.

    The same object for adapters without one. Raises IncompatibleCheckpointsError for a model that
    is no language model, and for one that lacks more than the adapter brings.
    """
    heads = _heads(adapter)
    if not heads:
        return model
    text = model.checkpoint.stated
    changes: dict[str, ConfigValue] = {}
    rows = [e.shape[0] for n, e in heads.items() if len(e.shape) == 2 and "dense" not in n]
    if len(rows) == 1 and _n_labels(text) != rows[0]:
        changes = {"id2label": None, "label2id": None}  # those of other labels
        for i in range(rows[0]):
            changes |= {f"id2label.{i}": f"LABEL_{i}", f"label2id.LABEL_{i}": i}
    views = dict(model.views)
    if lacks_head(model, adapter):
        changes["architectures"] = [_class(model, adapter, text, next(iter(heads)))]
        views = {n: v for n, v in views.items() if not _predicts_tokens(n)}
        _refuse_other_names(model, adapter, {*views, *heads})
    views |= {name: view_of(entry) for name, entry in heads.items()}
    return replace(model, views=views, becomes=tuple(changes.items()))


def lacks_head(model: Model, adapter: Checkpoint) -> bool:
    """Whether an adapter brings a classifier's head that a model does not have."""
    return any(name not in model.views for name in _heads(adapter))


def refuse_language_base(base: Model, adapter: Checkpoint) -> None:
    """Raise IncompatibleCheckpointsError for a classifier's adapter on a base that is none."""
    if not lacks_head(base, adapter):
        return
    whole = f"{base.checkpoint.root}+{adapter.root}"
    raise IncompatibleCheckpointsError(
        "An adapter makes a classifier of a base model that has no classifier",
        where=adapter.root,
        expected=f"a base model with {', '.join(_heads(adapter))}",
        found=f"{base.name!r} without it",
        next_step=f"write `base_model: {whole}` to merge what others differ from this classifier, "
        f"or {whole} as a model of a method without a base (passthrough, linear)",
    )


def _heads(adapter: Checkpoint) -> dict[str, TensorEntry]:
    """The tensors of the classifier's head that an adapter keeps, by their names in the model."""
    if adapter.adapter_stated.get("task_type") not in _CLASSES:
        return {}
    names = ((whole_name(entry), entry) for entry in adapter.tensors)
    return {n: e for n, e in names if n is not None and n.partition(".")[0] in _COMPLETE}


def _n_labels(config: Mapping[str, Any]) -> int | None:
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, dict) else None


def _class(model: Model, adapter: Checkpoint, config: Mapping[str, Any], head: str) -> str:
    kinds = config.get("architectures")
    kind = str(kinds[0]) if isinstance(kinds, list) and kinds else "no architecture"
    task = adapter.adapter_stated["task_type"]
    module, model_type = head.partition(".")[0], str(config.get("model_type", ""))
    found = classifier_of(kind, model_type, module, task)
    if found is not None:
        return found
    raise IncompatibleCheckpointsError(
        "A classifier has more layers than its adapter and its base model keep",
        where=adapter.root,
        expected=f"a base model that becomes {_CLASSES[task]} by {module!r} alone",
        found=f"{kind} in the config.json of {model.name!r}",
        next_step="merge it with peft, on the model that it was trained on: "
        f"`PeftModel.from_pretrained(AutoModel{_CLASSES[task]}.from_pretrained(BASE), ADAPTER)"
        ".merge_and_unload().save_pretrained(OUT)`, and give OUT",
    )


def _predicts_tokens(name: str) -> bool:
    return _TOKEN_HEAD.search(name) is not None or (embedding_like(name) and is_post(name))


def _refuse_other_names(model: Model, adapter: Checkpoint, names: set[str]) -> None:
    """Raise where transformers would not find body and head together in the result."""
    where = f"{adapter.root}, {CONFIG}"
    changes = find_changes(
        adapter, names, parse_adapter_config(adapter.adapter_config or "", where)
    )
    for name, change in changes.items():
        if f"{name}.".startswith(f"{change.module}."):
            continue
        raise IncompatibleCheckpointsError(
            "The base model of a classifier's adapter has other names than the classifier",
            where=f"{model.checkpoint.root}, tensor {name}",
            expected=f"{change.module}, as the adapter names it",
            found=name,
            next_step="save the base model again with transformers' "
            "`from_pretrained(BASE).save_pretrained(OUT)`, and give OUT",
        )
