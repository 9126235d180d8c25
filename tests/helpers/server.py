"""What tests of server rules share: rounds by hand, runs in the real loop, and a resume in the middle."""

import torch

from lightning_fcl.aggregators import RoundStats
from lightning_fcl.aggregators.chain import as_chain
from tests.helpers.toy import assert_same_bits, make_toy, state_of, toy_stream, toy_trainer


def stats_of(task=0, *, clients=1, examples=None, params=1, **facts):
    """A round of ``clients`` clients."""
    num_examples = tuple(examples or [1.0] * clients)
    settings = {"round": 0, "num_tasks": 9, "total_clients": 9, "num_params": params, "weights": num_examples}
    return RoundStats(task=task, clients=tuple(range(len(num_examples))), num_examples=num_examples, **settings | facts)


def run_rounds(rule, deltas, *, start=0.0, tasks=None, **facts):
    """Apply scalar mean deltas in turn, each counted from what was sent; ``(sent, weights, output)`` of each round."""
    chain, params = as_chain(rule), torch.tensor([start], dtype=torch.float64)
    states, seen = chain.init(params), []
    for number, delta in enumerate(deltas):
        task = tasks[number] if tasks else 0
        sent = chain.broadcast(params, states, task=task)
        value = delta(sent.item()) if callable(delta) else delta
        stats = stats_of(task, **{"round": number, "rounds": len(deltas), "square_norms": (value**2,), **facts})
        params, states = chain.apply(params, torch.tensor([value], dtype=torch.float64), stats, states)
        seen.append((sent.item(), params.item(), chain.output(params, states).item()))
    return seen


def weights(*args, **options):
    """The weights after each round of :func:`run_rounds`."""
    return [params for _, params, _ in run_rounds(*args, **options)]


def fit(run_dir, aggregator, *, ckpt_path=None, stream=None, **options):
    """A two-task run; the final state of the module."""
    module = make_toy(batch_norm=True)
    trainer = toy_trainer(run_dir, aggregator=aggregator, keep_checkpoints=99, **options)
    trainer.fit(module, toy_stream(**stream or {}), ckpt_path)
    return state_of(module)


def check_resumes(run_dir, make):
    """A run put back to the end of its first task ends with the same bits; returns its final state."""
    whole = fit(run_dir, make())
    commits = sorted((run_dir / "checkpoints").glob("round_*"))
    assert len(commits) == 4
    assert_same_bits(whole, fit(run_dir, make(), ckpt_path=commits[1]))
    return whole
