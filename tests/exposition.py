"""Reading what /metrics says."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def samples(exposition: str) -> dict[str, float]:
    """Name, and labels other than the model's in braces, to value; without the buckets of histograms."""
    values = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if "le" not in sample.labels:
                labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
                values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return values
