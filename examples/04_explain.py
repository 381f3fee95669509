"""Explain a model: what runs once over all tokens, what runs per request, and what is refused, with its line."""

from __future__ import annotations

import json

from torch import Tensor, nn

import selective_compile as sc
from selective_compile import tiny_model


class PeeksAhead(nn.Module):
    """A decoder that may not be batched so: every logit depends on all tokens, those to come included."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.decoder(input_ids, use_cache=False).logits  # [B, S, V]
        return logits - logits.mean(dim=1, keepdim=True)


def main() -> tuple[sc.Report, sc.Report]:
    """Returns the report on a decoder and that on one which peeks ahead."""
    model, _ = tiny_model.load()
    report = sc.explain(model)
    print(report)
    assert report.ok
    for record in json.loads(report.to_json())["passes"]:
        print(f"  {record['name']:>20}: {record['count']} in {record['seconds']:.2f} s")

    # What cannot be proved is refused, with the node and its source line; an Engine would raise the same.
    refused = sc.explain(PeeksAhead(model).eval())
    print(refused)
    assert not refused.ok
    return report, refused


if __name__ == "__main__":
    main()
