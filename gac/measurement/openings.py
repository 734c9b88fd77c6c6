"""First words of many kinds of text, which the dense model continues: from BOS alone it writes few kinds."""

OPENINGS = (
    "Chapter 1\n\n", "Installation\n\n", "import os\n", "def main(", "NAME\n    ", "Usage: ", "## Overview\n\n",
    "Abstract\n", "Q: ", "Step 1:", "Theorem 1.", "Dear ", '{\n  "name": "', "SELECT ", "#include <", "<html>\n",
    "The following table", "In this tutorial", "Ingredients:\n", "Once upon a time", "Breaking news:", "FAQ\n\n",
    "1. Introduction\n", "Parameters\n----------\n", "Options:\n  --", "Error: ", "function ", "class ",
    "According to", "Yesterday", "In 19", "The city of", "She said", "Section 2.", "Note that", "To configure",
    "Example:\n\n", "Solution:", "Problem:", "Review:", "Subject: ", "Summary\n\n", "License\n\n", "It was a",
    "Let x be", "The patient", "The court", "The method returns", "By default,", "If you want",
)  # fmt: skip
