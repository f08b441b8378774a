package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/internal/control"
)

func newSecrets() *cobra.Command {
	var c control.SecretsConfig
	var force bool
	cmd := &cobra.Command{
		Use:   "secrets DIRECTORY",
		Short: "Make the certificates, keys and tokens of a secure cluster",
		Long: `Make in a directory all secrets of a cluster: two authorities, certificates for callers and between
nodes, a gossip key, the cluster's secret, and an access file with tokens of a caller, an operator and Prometheus.

The directory has one directory for each Secret of deploy/k8s, and a kustomization of them: kubectl apply -k DIRECTORY.
On hosts, give the same files to every node:

  --tls-cert-file callers-tls/tls.crt --tls-key-file callers-tls/tls.key --tls-client-ca-file callers-tls/ca.crt
  --peer-tls-cert-file nodes-tls/tls.crt --peer-tls-key-file nodes-tls/tls.key --peer-tls-ca-file nodes-tls/ca.crt
  --peer-tls-name weir-node --access-file access/access.yaml
  --gossip-key-file cluster/gossip-keys --cluster-secret-file cluster/secret

each under DIRECTORY/SERVICE-. Keep DIRECTORY/authorities and DIRECTORY/tokens elsewhere: no node needs them.`,
		Args: namedArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := c.Validate(); err != nil {
				return err
			}
			made, err := control.WriteSecrets(args[0], c, time.Now(), force)
			switch {
			case errors.Is(err, control.ErrExists):
				return fmt.Errorf("%w: give another directory, or --force to write over it", err)
			case err != nil:
				return err
			}
			for _, name := range made {
				fmt.Fprintln(cmd.OutOrStdout(), filepath.Join(args[0], name))
			}
			return nil
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&c.Namespace, "namespace", "weir", "Kubernetes namespace of the cluster")
	fs.StringVar(&c.Service, "service", "weir",
		"name of the Service that callers use; the headless one is SERVICE-headless, and Secrets begin with it")
	fs.StringSliceVar(&c.Names, "names", nil,
		"more host names and addresses that callers reach nodes at, separated by commas")
	fs.StringVar(&c.PeerName, "peer-tls-name", "weir-node", "name in every node's certificate")
	fs.IntVar(&c.Days, "days", 365, "days that certificates are good for; authorities are good for ten times as long")
	fs.BoolVar(&force, "force", false,
		"overwrite existing files: nodes with the old secrets and with the new ones do not talk to each other")
	return cmd
}

func newToken() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "token",
		Short: "Make a token for a caller, and its hash for the access file",
		Long: `Make a token of 256 random bits. The caller keeps the token and presents it (Authorization: Bearer TOKEN); the nodes'
access file (weir run --access-file) has its hash, from which the token cannot be worked out. Nothing is stored.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			token := auth.NewToken()
			switch output {
			case "text":
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "token  %s\nhash   %s\n", token, auth.Hash(token))
				return err
			case "json":
				return json.NewEncoder(cmd.OutOrStdout()).Encode(map[string]string{"token": token,
					"hash": auth.Hash(token)})
			}
			return checkOutput(output)
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "how to print: text or json")
	return cmd
}
