package client

import (
	"context"
	"strings"
)

// WithToken presents a token with every call, for clusters with an access file. It goes with WithTLS, unless all addresses
// are on this host: a token can be used by all who read it on its way. Default: none.
func WithToken(token string) Option { return func(o *options) { o.token = token } }

// bearer is a token as gRPC presents it.
type bearer struct {
	token string
	plain bool // may be sent in plain text
}

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + b.token}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (b bearer) RequireTransportSecurity() bool { return !b.plain }

// checkToken says what is wrong with a token for an address.
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
