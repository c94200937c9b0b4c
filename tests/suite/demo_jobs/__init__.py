"""Jobs that end well and badly, for the tests of the demo."""
