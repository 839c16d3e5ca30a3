"""A bounded cache for what a training loop would otherwise recompute in every call."""

from typing import Any

LIMIT = 4096  # entries; few programs have as many shapes, and none should fill the memory with them


class Memo(dict[Any, Any]):
    """A dictionary that forgets everything rather than hold more than LIMIT entries. Look up with `get`.

    >>> memo = Memo()
    >>> memo.keep("key", 3)
    3
    >>> for i in range(LIMIT):
    ...     _ = memo.keep(i, i)
    >>> len(memo), memo.get("key")
    (1, None)
    """

    def keep(self, key: Any, value: Any) -> Any:
        if len(self) >= LIMIT:
            self.clear()
        self[key] = value
        return value
