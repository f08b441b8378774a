package cli

import (
	"context"
	"crypto/tls"
	"fmt"
	"strings"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/weirlimit/weir/internal/netaddr"
	"github.com/weirlimit/weir/internal/reload"
)

// identity has the credentials of a command, and the authorities by which it verifies the node. Without CA, Cert, Key
// and Name it uses plain text.
type identity struct {
	CA        string `flag:"tls-ca-file" help:"authorities (PEM) of the node's certificate; without any of --tls-…: plain text"`
	Cert      string `flag:"tls-cert-file" help:"certificate (PEM) to present"`
	Key       string `flag:"tls-key-file" help:"private key (PEM) of --tls-cert-file"`
	Name      string `flag:"tls-server-name" help:"name in the node's certificate (default: the host of --addr)"`
	TokenFile string `flag:"token-file" help:"file with the token to present"`
}

// encrypted reports whether the command uses TLS.
func (c *identity) encrypted() bool {
	return c.CA != "" || c.Cert != "" || c.Key != "" || c.Name != ""
}

// with returns a context whose calls to addr carry the token, if there is one.
func (c *identity) with(ctx context.Context, addr string) (context.Context, error) {
	token, err := c.token(addr)
	if err != nil || token == "" {
		return ctx, err
	}
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token), nil
}

// token returns the token for addr, or "" if there is none.
func (c *identity) token(addr string) (string, error) {
	if c.TokenFile == "" {
		return "", nil
	}
	token, err := readToken(c.TokenFile)
	if err != nil {
		return "", fmt.Errorf("token-file: %w", err)
	}
	if !c.encrypted() && !netaddr.LoopbackHostPort(addr) {
		return "", fmt.Errorf("token-file: the token would be sent to %s in plain text: give tls-ca-file", addr)
	}
	return token, nil
}

// readToken reads a token from a file that holds nothing else.
func readToken(name string) (string, error) {
	data, err := reload.ReadFile(name, 1<<20)
	if err != nil {
		return "", err
	}
	token := strings.TrimSpace(string(data))
	if token == "" || strings.ContainsAny(token, " \t\r\n") {
		return "", fmt.Errorf("%s: must hold one token and nothing else; make one with: weir token", name)
	}
	return token, nil
}

// transport returns the credentials of a connection to a node.
func (c *identity) transport() (credentials.TransportCredentials, error) {
	config, err := c.config()
	switch {
	case err != nil:
		return nil, err
	case config == nil:
		return insecure.NewCredentials(), nil
	}
	return credentials.NewTLS(config), nil
}

// config returns the TLS configuration; nil: plain text.
func (c *identity) config() (*tls.Config, error) {
	if !c.encrypted() {
		return nil, nil
	}
	config, err := reload.CertFiles{Cert: c.Cert, Key: c.Key,
		CA: c.CA}.Client(reload.CertFiles{Cert: "tls-cert-file", Key: "tls-key-file", CA: "tls-ca-file"})
	if err == nil {
		config.ServerName = c.Name
	}
	return config, err
}
