"""Show: tables, figures and pages."""
