"""Whether a module still has the layers and trainable parameters that it had."""

from operator import is_

from torch import nn


class Structure:
    """A module's layers and parameters at one moment, by identity.

    Going through ``named_parameters`` before and after each job would cost more than what else switches a client.

    Args:
        module: The module to watch.

    Attributes:
        trainable: Ids of its trainable parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tables = [(t, list(t.values())) for c in module.modules() for t in (c._modules, c._parameters)]
        self._flags = [(p, p.requires_grad) for p in module.parameters()]
        self.trainable = {id(p) for p, trainable in self._flags if trainable}

    def holds(self) -> bool:
        """Whether nothing was added, taken away, replaced, frozen or unfrozen."""
        return all(
            len(table) == len(values) and all(map(is_, table.values(), values)) for table, values in self._tables
        ) and all(p.requires_grad == trainable for p, trainable in self._flags)
