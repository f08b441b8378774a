// Package kuadrantpb is the code generated from the interface of Kuadrant's Limitador for gateways.
package kuadrantpb
