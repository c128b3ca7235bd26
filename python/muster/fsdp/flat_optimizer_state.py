# SPDX-License-Identifier: BSD-3-Clause
"""An optimizer's state by names as one dictionary, as torch.distributed.checkpoint.state_dict has
it:

    "state.NAME.KEY": value, "param_groups.NAME.OPTION": value

The options of a group stand beside each of its parameters, so a part of a model finds its own.
"""

import torch

from . import units


def flattened(state):
    """Raises NotImplementedError for values that are no tensors, numbers or dictionaries."""
    flat = {}

    def put(prefix, value):
        if isinstance(value, dict):
            for key, each in value.items():
                put(f"{prefix}.{key}", each)
        elif isinstance(value, (torch.Tensor, int, float)):
            flat[prefix] = value
        else:
            raise NotImplementedError(
                f"flatten_optimizer_state_dict: {prefix} is a {type(value).__name__}; flat states "
                "hold tensors, numbers and dictionaries of them"
            )

    for name, each in state["state"].items():
        put(f"state.{name}", each)
    for group in state["param_groups"]:
        for name in group["params"]:
            for option, value in group.items():
                if option != "params":
                    flat[f"param_groups.{name}.{option}"] = value
    return flat


def unflattened(flat, groups):
    """The state again; groups: the names of each group's parameters. Names of others are left out.
    Raises RuntimeError where options differ within a group, ValueError (DistArgumentError) where a
    parameter has none.
    """
    names = {name for group in groups for name in group}
    of = {name: {"state": {}, "param_groups": {}} for name in names}
    for path, value in flat.items():
        kind, _, rest = path.partition(".")
        words = rest.split(".")
        # The longest name: another parameter's may be the beginning of it.
        cuts = [at for at in range(len(words) - 1, 0, -1) if ".".join(words[:at]) in names]
        if not cuts or kind not in ("state", "param_groups"):
            continue
        into = of[".".join(words[: cuts[0]])][kind]
        for word in words[cuts[0] : -1]:
            into = into.setdefault(word, {})
        into[words[-1]] = value
    made = []
    for group in groups:
        options = None
        for name in group:
            found = of[name]["param_groups"]
            if not found:
                units.refuse(f"the flat state of the optimizer has no options of {name!r}")
            if options is not None and found != options:
                raise RuntimeError(
                    f"the flat state has other options for {name!r} than for other parameters of "
                    f"its group: {found} and {options}"
                )
            options = found
        made.append(dict(options or {}, params=list(group)))
    return {
        "state": {name: each["state"] for name, each in of.items() if each["state"]},
        "param_groups": made,
    }
