//! How guarded requests are named: what all proxies of the store agree on, and how one that is alone changes it.

use std::collections::BTreeMap;
use std::time::Duration;

use super::machine::{self, Renaming};
use super::{Fleet, Stage, naming_records, versions};
use crate::store::registry::View;

/// How long the records are waited for.
const READ: Duration = Duration::from_secs(5);

/// Why requests are not named in another way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotNamed {
    /// They are named as before.
    Refused(String),
    /// The store did not say whether the new names were recorded. Until it says so, nothing may be granted by the
    /// old names, for another proxy may join by the new ones, nor by the new ones.
    Unknown(String),
}

impl Fleet {
    /// Whether guarded requests may be named in another way, as far as that is known without asking the store.
    ///
    /// # Errors
    /// Why not.
    pub async fn may_name(&self, naming: &BTreeMap<String, String>) -> Result<Renaming, String> {
        let own = versions(&*self.0.naming.lock().await);
        let view = self.0.view.borrow().clone();
        self.renaming(&view, &own, naming)
    }

    fn renaming(
        &self,
        view: &View,
        own: &machine::PolicyVersions,
        naming: &BTreeMap<String, String>,
    ) -> Result<Renaming, String> {
        let member = {
            let state = self.0.state();
            (state.stage == Stage::Member).then_some(state.id)
        };
        machine::renaming(view, member, own, &versions(&naming_records(naming)))
    }

    /// Adopts the naming that the fleet has recorded. [`Fleet::may_name`] has found it equal to this one.
    ///
    /// # Errors
    /// Why requests are named as before.
    pub async fn follow_naming(&self, naming: &BTreeMap<String, String>) -> Result<(), String> {
        let mut own = self.0.naming.lock().await;
        let view = self.read().await.ok_or("the records of the fleet could not be read in time")?;
        match self.renaming(&view, &versions(&own), naming)? {
            Renaming::Recorded => {
                *own = naming_records(naming);
                Ok(())
            }
            Renaming::Alone => Err("the records of the fleet have changed meanwhile".to_owned()),
        }
    }

    /// Records that guarded requests are named in another way from now on, which takes a fleet of one. No lease may be
    /// left that was granted under a name that is given no more, and none may be granted until this returns.
    pub async fn name_requests(&self, naming: &BTreeMap<String, String>) -> Result<(), NotNamed> {
        let records = naming_records(naming);
        let mut own = self.0.naming.lock().await;
        let id = self.0.state().id;
        match self.0.registry.initialize(id, records.clone()).await {
            Ok(true) => {
                *own = records;
                self.0.hurry.notify_one();
                Ok(())
            }
            Ok(false) => {
                drop(own);
                let refused = || Err(NotNamed::Refused(machine::OTHERS.to_owned()));
                self.has_named(naming).await.unwrap_or_else(refused)
            }
            Err(error) => Err(NotNamed::Unknown(error.to_string())),
        }
    }

    /// What became of a [`Fleet::name_requests`] whose answer was lost. `None` where that is not certain: the record is
    /// as before, and the write may land yet.
    ///
    /// It is certain where the record says so, and where another proxy may grant, or this one was counted as gone: both
    /// need rows that the write has locked until its end.
    pub async fn has_named(&self, naming: &BTreeMap<String, String>) -> Option<Result<(), NotNamed>> {
        let mut own = self.0.naming.lock().await;
        let Some(view) = self.read().await else {
            return Some(Err(NotNamed::Unknown("the records of the fleet could not be read".to_owned())));
        };
        let records = naming_records(naming);
        if machine::are_recorded(&view, &versions(&records)) {
            *own = records;
            return Some(Ok(()));
        }
        let own = versions(&own);
        self.renaming(&view, &own, naming).err().map(|why| Err(NotNamed::Refused(why)))
    }

    /// What is recorded, read after this was called.
    async fn read(&self) -> Option<View> {
        let mut views = self.0.view.subscribe();
        tokio::time::timeout(READ, self.0.fresh_view(&mut views)).await.ok()?;
        let view = views.borrow().clone();
        Some(view)
    }

    /// Has the stores beside the table give tokens above all that they gave before, as keys get other names.
    ///
    /// # Errors
    /// Where one of them cannot.
    pub async fn raise_tokens(&self) -> Result<(), String> {
        self.0.service.raise_tokens().await.map_err(|error| error.to_string())
    }
}
