"""An oracle for the methods: written from the papers, in float64, without ftopt; and a driver that compares them."""
