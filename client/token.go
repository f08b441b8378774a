package client

import (
	"context"
	"strings"
)

// WithToken sends a token with every call, for clusters with an access file. It needs WithTLS, unless all addresses are
// on this host, because a host on the way could read the token and use it. Default: no token.
func WithToken(token string) Option { return func(o *options) { o.token = token } }

// bearer is a token in gRPC's form.
type bearer struct {
	token string
	plain bool // the token may be sent in plain text
}

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + b.token}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (b bearer) RequireTransportSecurity() bool { return !b.plain }

// checkToken returns an error if a token is malformed, or must not be sent to an address.
func checkToken(o *options, a *address) error {
	switch {
	case o.token == "":
		return nil
	case strings.ContainsFunc(o.token, func(r rune) bool { return r <= ' ' || r >= 0x7f }):
		return invalid("WithToken", "must be printable ASCII without spaces")
	case o.tls == nil && !a.local():
		return invalid("WithToken", "goes with WithTLS: the token could be read on its way to another host")
	}
	return nil
}
