"""Steps that clean, fix, merge, number and shuffle documents."""
