"""The page that shows where a model spends its bits: results as data of a page, and that page as HTML."""
