"""The suite, a package so that its files can share what one of them defines."""
