// Package structure holds the code to its plan: which package may import which, where the clock is read, and a few
// habits. It holds nothing but tests.
package structure
