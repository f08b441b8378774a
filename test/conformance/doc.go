// Package conformance asks the same of every protocol that callers speak, and expects the same answers. Its table of
// cases is testdata/cases.txt. What one protocol alone has is tested beside its gateway.
package conformance
