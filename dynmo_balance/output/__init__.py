"""Output: tables, HTML report, SVG, Chrome traces, export to other frameworks."""
