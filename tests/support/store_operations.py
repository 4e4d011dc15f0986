"""Random operations on stores in virtual memory, beside models of them that are lists of tokens."""

import gc
import random
from copy import deepcopy
from dataclasses import replace

import torch

from sparsekv.plans.errors import UsageError
from sparsekv.runtime.stores.device import RowStore
from sparsekv.runtime.stores.page_pool import PageError, PagePool
from sparsekv.runtime.stores.store import Layout
from sparsekv.runtime.stores.virtual import VirtualStore


class Model:
    """What a store should hold: tokens of each row, as rows of numbers."""

    def __init__(self, store: VirtualStore, layout: Layout):
        self.store, self.one = store, layout
        self.rows: list[torch.Tensor] = []  # [2, tokens, G, D]

    def new(self, count: int, batch: int | None = None) -> torch.Tensor:
        """Keys and values of so many tokens, in all rows."""
        one, batch = self.one, len(self.rows) if batch is None else batch
        return torch.randn(2, batch, one.heads, count, one.size, dtype=one.dtype, device=one.device)

    def check(self) -> None:
        """All rows, bit for bit."""
        assert (self.store.lengths or (0,) * len(self.rows)) == tuple(map(len, self.lengths))
        for number, row in enumerate(self.rows if self.store.lengths else []):
            lengths_B = torch.tensor(self.store.lengths, dtype=torch.int32, device=self.one.device)
            view = self.store.view(lengths_B)
            for x, expected in zip((view.k, view.v), row, strict=True):
                assert torch.equal(x[number, :, : len(expected)].transpose(0, 1), expected)

    @property
    def lengths(self) -> list[range]:
        return [range(row.shape[1]) for row in self.rows]


class Operations:
    """Random operations on stores of one pool and on their models.

    Args:
        layout: of one row.
        scale: how many times the usual number of tokens.
    """

    def __init__(self, pool: PagePool, seed: int, layout: Layout, scale: int = 1):
        self.pool, self.random, self.layout, self.scale = pool, random.Random(seed), layout, scale
        self.context = 600 * scale
        self.models: list[Model] = []
        self.failures = 0
        torch.manual_seed(seed)

    def step(self) -> None:
        if not self.models or (len(self.models) < 3 and self.random.random() < 0.02):
            model = Model(VirtualStore(self.pool, self.context), self.layout)
            model.rows = [model.new(0, 1)[:, 0].transpose(1, 2)] * self.random.randint(1, 4)
            self.models.append(model)
        model = self.random.choice(self.models)
        name = self.random.choice(
            ["append"] * 6 + ["steps"] * 4 + ["row"] * 2 + ["crop"] * 3 + ["swap", "fork", "beams", "pick", "copy"]
            + ["expect", "reserve", "clear", "free"][: self.random.randint(0, 4)]
        )  # fmt: skip
        try:
            getattr(self, name)(model)
        except (torch.OutOfMemoryError, PageError, UsageError):
            self.failures += 1
        model.check()

    def append(self, model: Model) -> None:
        most = 1 if self.random.random() < 0.5 else self.random.choice([3, 60, 300]) * self.scale
        self.add(model, self.random.randint(1, most))

    def add(self, model: Model, count: int) -> None:
        new = model.new(count)
        if self.random.random() < 0.5:
            model.store.append(*new)
        else:
            room = model.store.room(count, Layout.of(new[0]))
            for there, given in zip(room, new, strict=True):
                there.copy_(given)
            model.store.commit(*room)
        for row, tokens in enumerate(new.transpose(2, 3).unbind(1)):
            model.rows[row] = torch.cat((model.rows[row], tokens), 1)

    def steps(self, model: Model) -> None:
        """As captured steps write them."""
        if not model.store.lengths or 0 in model.store.lengths:
            return
        for _ in range(self.random.randint(1, 40)):
            model.store.prepare(model.store.length + 1)
            new = model.new(1)
            for x, tokens in zip(model.store.tensors, new, strict=True):
                for row, length in enumerate(model.store.lengths):
                    x[row, :, length] = tokens[row, :, 0]
            model.store.advance(1)
            for row, tokens in enumerate(new.transpose(2, 3).unbind(1)):
                model.rows[row] = torch.cat((model.rows[row], tokens), 1)

    def row(self, model: Model) -> None:
        row, count = self.random.randrange(len(model.rows)), self.random.randint(1, 100 * self.scale)
        new = model.new(count, 1)
        RowStore(model.store, row, len(model.rows)).append(*new)
        model.rows[row] = torch.cat((model.rows[row], new[:, 0].transpose(1, 2)), 1)

    def crop(self, model: Model) -> None:
        if not model.store.lengths:
            return
        few = self.random.random() < 0.5
        left = [
            len(length) - self.random.randint(0, min(len(length), 5 if few else len(length)))
            for length in model.lengths
        ]
        if self.random.random() < 0.5:
            left = [min(left[0], len(length)) for length in model.lengths]
        model.rows = [row[:, :count] for row, count in zip(model.rows, left, strict=True)]
        model.store.truncate(left)

    def swap(self, model: Model) -> None:
        self.select(model, self.random.sample(range(len(model.rows)), len(model.rows)))

    def beams(self, model: Model) -> None:
        self.select(model, [self.random.randrange(len(model.rows)) for _ in model.rows])

    def fork(self, model: Model) -> None:
        if len(model.rows) <= 3:
            self.select(model, [row for row in range(len(model.rows)) for _ in range(2)])

    def pick(self, model: Model) -> None:
        count = self.random.randint(1, len(model.rows))
        self.select(model, self.random.sample(range(len(model.rows)), count))

    def select(self, model: Model, rows: list[int]) -> None:
        if model.store.lengths:
            model.store.select(rows)
            model.rows = [model.rows[row] for row in rows]

    def copy(self, model: Model) -> None:
        if len(self.models) < 4:
            twin = Model(deepcopy(model.store), self.layout)
            twin.rows = list(model.rows)
            twin.check()
            self.models.append(twin)

    def reserve(self, model: Model) -> None:
        model.store.reserve(self.random.randint(1, 400 * self.scale))

    def expect(self, model: Model) -> None:
        wanted = [len(had) + self.random.randint(0, 300 * self.scale) for had in model.lengths]
        model.store.expect(wanted, replace(model.one, batch=len(model.rows)))

    def clear(self, model: Model) -> None:
        model.rows = [row[:, :0] for row in model.rows]
        model.store.truncate(self.random.choice([(), (0,) * len(model.rows)]))

    def free(self, model: Model) -> None:
        self.models.remove(model)
        model.store = VirtualStore(self.pool, self.context)
        model.rows = [row[:, :0] for row in model.rows]


def run_operations(pool: PagePool, seed: int, count: int, layout: Layout, scale: int = 1) -> None:
    """So many of them, with calls that fail and memory that runs out; asserts that nothing is lost."""
    operations, driver, page = Operations(pool, seed, layout, scale), pool.driver, pool.driver.granularity
    for _ in range(count):
        if operations.random.random() < 0.03:
            driver.fail = operations.random.choice(["map", "allow", "reserve", "unmap", "settle", "free"])
            driver.fail_after = operations.random.randint(0, 4)
        if operations.random.random() < 0.1:
            driver.limit = operations.random.choice([8, 32, 64, 256]) * page
        operations.step()
        driver.fail = ""
        with pool.first():  # closes what could not be closed
            pass
        assert pool.used + pool.bytes == sum(driver.created.values())
        assert pool.used == sum(model.store.bytes.device for model in operations.models)
    assert operations.failures > count // 200
    operations.models.clear()
    gc.collect()
    with pool.first():
        pass
    assert pool.used == 0
    pool.trim()
    assert (driver.created, driver.mapped, driver.reserved) == ({}, {}, {})
