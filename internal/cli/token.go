package cli

import (
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/weirlimit/weir/auth"
)

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
				return json.NewEncoder(cmd.OutOrStdout()).Encode(map[string]string{"token": token, "hash": auth.Hash(token)})
			}
			return fmt.Errorf("output: %q is not one of text and json", output)
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "how to print: text or json")
	return cmd
}
