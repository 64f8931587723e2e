"""Writes components/monitoring/prometheusrule.yaml out of deploy/prometheus/rules/nwor.yml, their one source.

Run it after a change of the rules: ``python deploy/kubernetes/generate_rules.py``. A test fails until then.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "prometheus" / "rules" / "nwor.yml"
TARGET = HERE / "components" / "monitoring" / "prometheusrule.yaml"

_HEAD = """\
# Made by deploy/kubernetes/generate_rules.py out of deploy/prometheus/rules/nwor.yml: change that file.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: nwor
  labels:
    app.kubernetes.io/name: nwor
spec:
"""


def generate() -> str:
    """Return the manifest: the rules' text, comments included, as the specification of a PrometheusRule."""
    return _HEAD + textwrap.indent(SOURCE.read_text("utf-8"), "  ")


if __name__ == "__main__":
    TARGET.write_text(generate(), "utf-8")
