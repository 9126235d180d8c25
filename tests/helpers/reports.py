"""Reports made by hand, and a reader of pages that is as strict as a browser is not."""

import re
from html.parser import HTMLParser

import torch

from lightning_fcl.reports import RunReport

HOSTILE = "</td><script>alert('1')</script>&amp;\"|$x_1$"
NAN = float("nan")


def make_report(run_dir, scores=((0.8, 0.05), (0.6, 0.85)), *, method="FedAvg", seed=0, names=None, **options):
    scores = torch.as_tensor(scores, dtype=torch.float64)
    names = names or [f"task_{column}" for column in range(scores.shape[1])]
    return RunReport(run_dir=run_dir, method=method, accuracy=scores, names=names, seed=seed, **options)


def config_of(*, rounds=2, plan="a", **stream):
    return {"trainer": {"rounds": rounds}, "stream": {"plan": plan, **stream}}


class Page(HTMLParser):
    """Text and tags of a page; fails where tags do not match."""

    EMPTY = ("meta", "img", "br")

    def __init__(self, source):
        super().__init__()
        self.source, self.open, self.tags, self.texts = source, [], [], []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self):
        return "\n".join(self.texts)

    def assert_self_contained(self):
        assert not {"script", "link", "iframe", "object", "base", "form"} & {tag for tag, _ in self.tags}
        assert [name for _, attrs in self.tags for name in attrs if name.startswith("on")] == []
        addresses = [attrs[name] for _, attrs in self.tags for name in ("src", "href") if name in attrs]
        assert [address for address in addresses if not address.startswith("data:image/png;base64,")] == []
        assert re.search(r"url\(|@import", self.source) is None
