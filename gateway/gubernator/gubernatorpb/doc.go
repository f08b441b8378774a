// Package gubernatorpb is the code generated from Gubernator's interface for callers. A program that links Gubernator
// itself must not link it: two registrations of one protocol panic.
package gubernatorpb
