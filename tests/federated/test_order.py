"""Two processes give what one gives, bit for bit."""

from pathlib import Path

import pytest

from lightning_fcl.aggregators import (
    TSGA,
    Chain,
    FedACG,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedExP,
    MultiKrum,
    NormBound,
    ServerProximal,
    WeightAverage,
)
from lightning_fcl.callbacks import EWC, ClientProximal, FedProx, RoundEarlyStopping
from tests.helpers.toy import assert_same_bits, make_toy, state_of, toy_stream, toy_trainer

CASES = {
    "fedavg": {},
    "one client a round": {"clients_per_round": 1},
    "ten clients a round": {"clients_per_round": 10},
    "special": {"aggregator": ServerProximal(0.3)},
    "chain": {"aggregator": Chain(FedAvg(lr=0.5), ServerProximal(0.3, bn_stats="current"))},
    "tsga": {"aggregator": TSGA("auto")},
    "tsga in a chain": {"aggregator": [TSGA(0.3, weighting="soft", only="net.*.weight"), ServerProximal(0.3)]},
    "server steps": {"aggregator": Chain(NormBound(0.5), FedAdam(0.05), FedAvgM(0.5), WeightAverage(0.0))},
    "extrapolation": {"aggregator": FedExP(0.0)},
    "look-ahead and Krum": {"aggregator": Chain(MultiKrum(1), FedACG(0.8))},
    "prox": {"callbacks": [FedProx(0.1)]},
    "special-c": {"callbacks": [ClientProximal(0.1)]},
    "ewc": {"callbacks": [EWC(5.0)]},
    "stopping": {"server_callbacks": [RoundEarlyStopping("round/val_acc", patience=1)], "eval_every": 1, "rounds": 4},
    "skips": {"on_client_error": "skip", "callbacks": ["fault"]},
}


def fit(case: str, run_dir: str, devices: int):
    from lightning_fcl.callbacks import FaultInjector

    options = dict(CASES[case])
    if options.get("callbacks") == ["fault"]:
        options["callbacks"] = [FaultInjector("nan", clients=[2, 5]), FaultInjector("exception", clients=[1], round=0)]
    clients = 12 if case == "ten clients a round" else 7
    module = make_toy(dropout=0.3, batch_norm=True, momentum=0.9)
    stream = toy_stream(clients=clients, examples=120, batch_size=6)
    trainer = toy_trainer(run_dir, devices=devices, **{"clients_per_round": 5, **options})
    report = trainer.fit(module, stream)
    return state_of(module), report.accuracy


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:.*dropped")
@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(case, ranks, tmp_path):
    one, accuracy = fit(case, str(tmp_path / "one"), 1)
    results = ranks.run(fit, case, str(tmp_path / "two"), 2)
    for state, matrix in results:
        assert_same_bits(one, state)
        assert matrix.nan_to_num(-1).equal(accuracy.nan_to_num(-1))
    for name in ("metrics.csv", "failures.csv", "accuracy.csv"):
        assert (tmp_path / "one" / name).read_text() == (tmp_path / "two" / name).read_text(), name
    assert len(Path(tmp_path / "one" / "metrics.csv").read_text().splitlines()) > 3
