"""The report of a run: `report.html` beside its record."""

from paceline.report.page import write_report

__all__ = ["write_report"]
