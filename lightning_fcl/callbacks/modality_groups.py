"""Which parameters of a multimodal model belong to its vision, its language and its projector."""

from collections.abc import Iterable, Mapping

from lightning_fcl._match import NameRule, name_matcher
from lightning_fcl.exceptions import MisconfigurationError

MODALITIES: dict[str, set[str]] = {
    # What joins the two stands inside one of them in some models, so it is looked for first.
    "projector": {"multi_modal_projector", "mm_projector", "projector", "connector", "merger", "deepstack_merger_list"}
    | {"resampler", "aligner", "image_newline"},
    "vision": {"vision_tower", "vision_model", "vision_encoder", "image_encoder", "visual", "vpm", "vision"},
    "language": {"language_model", "text_model", "text_encoder", "llm", "lm_head", "language"},
}
"""Parts of a dotted name that tell the group."""


def parameter_groups(names: Iterable[str], rules: Mapping[str, NameRule] | None = None) -> dict[str, list[str]]:
    """Split parameters into groups, each in exactly one.

    Args:
        names: Dotted names of the (trainable) parameters.
        rules: By group, a glob, ``"re:<regex>"``, or a list of them. By default ``projector``, ``vision`` and
            ``language`` are told by the parts of the name that LLaVA, Qwen-VL, MiniCPM-V, SmolVLM and their kin in
            transformers use, under any prefix and with PEFT's wrappers or without.

    Returns:
        Names by group, without empty groups.

    Raises:
        MisconfigurationError: If a name falls into no group or into several; the message lists such names.

    Example:
        >>> parameter_groups(["model.vision_tower.q.weight", "model.language_model.q.weight", "lm_head.weight"])
        {'vision': ['model.vision_tower.q.weight'], 'language': ['model.language_model.q.weight', 'lm_head.weight']}
        >>> parameter_groups(["body.weight", "head.weight"], {"old": "body.*"})
        Traceback (most recent call last):
        ...
        lightning_fcl.exceptions.MisconfigurationError: `groups` must put each trainable parameter into one group, got \
none for 'head.weight'. Name it in a rule of `groups`, or freeze it.
    """
    matchers = None if rules is None else {group: name_matcher(rule) for group, rule in rules.items()}
    groups: dict[str, list[str]] = {group: [] for group in (MODALITIES if rules is None else rules)}
    none: list[str] = []
    several: list[str] = []
    for name in names:
        if matchers is None:
            parts = set(name.split("."))
            found = [group for group, words in MODALITIES.items() if parts & words][:1]
        else:
            found = [group for group, matches in matchers.items() if matches(name)]
        for group in found:
            groups[group].append(name)
        if len(found) != 1:
            (several if found else none).append(name)
    for strays, got in ((none, "none"), (several, "several")):
        if strays:
            listed = ", ".join(map(repr, strays[:5])) + (f" and {len(strays) - 5} more" if len(strays) > 5 else "")
            raise MisconfigurationError(
                f"`groups` must put each trainable parameter into one group, got {got} for {listed}. "
                "Name it in a rule of `groups`, or freeze it."
            )
    return {group: members for group, members in groups.items() if members}
